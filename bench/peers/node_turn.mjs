/* node_turn: llama.cpp behind the line protocol of bench/peers (see README.md), through the binding
   of the package node-llama-cpp.

       node node_turn.mjs MODEL THREADS N_CTX KV_TYPE      KV_TYPE: f16 or f32

   A turn answers with the milliseconds of llama.cpp's own clock, which runs from the start of
   llama_decode until the logits are there; sampling, the event loop and the binding's queues are
   outside. The binding gives llama.cpp no thread pool, so that every batch starts new threads: that
   is inside. Batches go straight to the context's _ctx, which is internal; the version is pinned.
   It has one sequence, and no turns with more. */
import readline from "node:readline";
import {getLlama, GgmlType} from "node-llama-cpp";

const MICRO_BATCH = 512;   // llama.cpp's default n_ubatch

const [path, threads, nCtx, kvType] = process.argv.slice(2);

/* ---- what llama.cpp says of itself ---- */

let onLog = () => {};

/* Lines of its log that tell how it computes. */
const TELLING = /loaded CPU backend|model buffer size|Flash Attention|\(.* cells,/;
const facts = [];

function watchLoad(message) {
    if (TELLING.test(message)) facts.push(message.replace(/^\w+: +/, "").trim());
}

/* Resolves to the milliseconds that llama.cpp counted since the last call, then counts from 0. The
   log comes from a queue of the binding, some time after the call that wrote it. */
function ownTimes(context) {
    return new Promise((resolve, reject) => {
        const times = {};
        const late = setTimeout(() => reject(new Error("llama.cpp printed no timings")), 10000);
        onLog = (message) => {
            const line = /(prompt eval|eval|total) time = +([0-9.]+) ms/.exec(message);
            if (line) times[line[1]] = Number(line[2]);
            if (!("total" in times)) return;
            clearTimeout(late);
            resolve(times);
        };
        context.printTimings();
    });
}

/* ---- turns ---- */

let past = 0;   // positions in the cache

function truncate(context, length) {
    if (past > length && !context.removeTokenCellsFromSequence(0, length, -1)) {
        throw new Error("llama.cpp could not remove positions");
    }
    past = Math.min(past, length);
}

/* Any ids do, the cost is the same for all; both programs use these. */
function tokensAt(first, n) {
    return Uint32Array.from({length: n}, (_, i) => (first + i) * 197 % 499);
}

/* One llama_decode; logits for the last token if asked. */
async function computeBatch(context, n, withLogits) {
    context.initBatch(n);
    context.addToBatch(0, past, tokensAt(past, n), Uint32Array.from(withLogits ? [n - 1] : []));
    await context.decodeBatch();
    past += n;
}

async function append(context, n) {
    for (let left = n; left > 0; left -= MICRO_BATCH) {
        await computeBatch(context, Math.min(left, MICRO_BATCH), left <= MICRO_BATCH);
    }
}

/* One token that is not counted, as in the other programs. */
async function warmUp(context, length) {
    truncate(context, length);
    await append(context, length - past);
    await append(context, 1);
    truncate(context, length);
}

async function measure(context, which, work) {
    await ownTimes(context);
    await work();
    return (await ownTimes(context))[which];
}

async function prefill(context, n) {
    await warmUp(context, 0);
    return measure(context, n === 1 ? "eval" : "prompt eval", () => append(context, n));
}

async function decode(context, length, n) {
    await warmUp(context, length);
    return measure(context, "eval", async () => {
        for (let i = 0; i < n; i++) await computeBatch(context, 1, true);
    });
}

/* ---- start ---- */

async function load() {
    onLog = watchLoad;
    const llama = await getLlama({
        gpu: false, build: "never", skipDownload: true, progressLogs: false, maxThreads: 0,
        logLevel: "log", logger: (_level, message) => onLog(message)
    });
    facts.push(llama.systemInfo);
    const model = await llama.loadModel({modelPath: path, ignoreMemorySafetyChecks: true});
    const context = await model.createContext({
        contextSize: Number(nCtx), batchSize: MICRO_BATCH, sequences: 1, threads: Number(threads),
        experimentalKvCacheKeyType: GgmlType[kvType.toUpperCase()],
        experimentalKvCacheValueType: GgmlType[kvType.toUpperCase()],
        performanceTracking: true, ignoreMemorySafetyChecks: true
    });
    if (context._ctx.getThreads() !== Number(threads)) throw new Error("other number of threads");
    await ownTimes(context._ctx);   // the log of the load is complete
    return context._ctx;
}

const context = await load();
console.log(`ready llama.cpp; ${facts.join("; ")}`);
for await (const line of readline.createInterface({input: process.stdin})) {
    const [command, ...numbers] = line.split(" ");
    const [a, b] = numbers.map(Number);
    if (command === "prefill") console.log(await prefill(context, a));
    else if (command === "decode") console.log(await decode(context, a, b));
    else if (command === "quit") break;
    else console.log(`error ${line}`);
}
process.exit(0);
