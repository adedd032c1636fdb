// llama.cpp through node-llama-cpp: reads a job as JSON, and writes what the GGUF file generates greedily.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import {readFileSync} from "node:fs";

const folder = process.argv[2];
const place = createRequire(`${folder}/package.json`).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(place));
const job = JSON.parse(readFileSync(0, "utf8"));

const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const answers = [];
for (const file of job.folders) {
    const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
    const context = await model.createContext({contextSize: 128, threads: 1, flashAttention: false,
        experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"});
    answers.push([]);
    for (const prompt of job.prompts) {
        const sequence = context.getSequence();
        const found = [];
        for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            found.push(token);
            if (found.length === job.new) break;
        }
        answers.at(-1).push(found);
        sequence.dispose();
    }
    await context.dispose();
    await model.dispose();
}
process.stdout.write(JSON.stringify(answers));
process.exit(0);
