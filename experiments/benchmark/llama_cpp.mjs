// llama.cpp as a peer of beside.py: a request and an answer are a line each.
//   node llama_cpp.mjs PACKAGES THREADS TARGET.gguf [DRAFT.gguf]
import {readFile} from "node:fs/promises";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [packages, threads, ...files] = process.argv.slice(2);
const place = `${packages}/node_modules/node-llama-cpp`;
const {getLlama, DraftSequenceTokenPredictor} = await import(pathToFileURL(`${place}/dist/index.js`));
const {version} = JSON.parse(await readFile(`${place}/package.json`));
const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads, logger() {}});
const [target, draft] = await Promise.all(files.map(async (modelPath) => {
  const model = await llama.loadModel({modelPath});
  return model.createContext({contextSize: 1024, threads: +threads});
}));

async function generate({ids, tokens, gamma}) {
  const drafting = gamma ? draft.getSequence() : null;
  // As many tokens in every round, however sure the draft is.
  const lengths = {minTokens: gamma, maxTokens: gamma, minConfidence: 0};
  const tokenPredictor = gamma ? new DraftSequenceTokenPredictor(drafting, lengths) : undefined;
  const sequence = target.getSequence({tokenPredictor});
  const found = [];
  for await (const id of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    if (found.push(id) === tokens) break;
  }
  const end = performance.now();
  await sequence.dispose();
  await drafting?.dispose();
  return [found, end];
}

const {release} = llama.llamaCppRelease;
console.log(JSON.stringify({version: `llama.cpp ${release}, node-llama-cpp ${version}`}));
for await (const line of createInterface({input: process.stdin})) {
  const begin = performance.now();
  const [found, end] = await generate(JSON.parse(line));
  console.log(JSON.stringify({ids: found, seconds: (end - begin) / 1e3}));
}
