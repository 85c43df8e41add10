"""When adaptive draft lengths pay: simulated by replay, and beside it what traces say.

`sweep.py` replays synthetic rollouts, `points.py` puts traces among them, `pictures.py` draws.
"""
