"""When adaptive draft lengths pay: `synthetic.py` makes rollouts without models."""
