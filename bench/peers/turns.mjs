/* turns: kvc.h and llama.cpp on the same GGUF files, turn by turn; README.md says how to read it.

       node turns.mjs --programs FOLDER [options] MODEL.gguf...

   The engines are programs that stay loaded and answer lines. While one has its turn, the others
   wait for their next line; what they burn meanwhile is measured and printed. */
import {spawn} from "node:child_process";
import {once} from "node:events";
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import {setTimeout as sleep} from "node:timers/promises";
import {parseArgs} from "node:util";

const HELP = `usage: node turns.mjs --programs FOLDER [options] MODEL.gguf...
  --programs DIR   where kvc_turn and llama_turn are
  --engines LIST   of kvc,llama,node (kvc,llama); node: llama.cpp through the binding
  --phases LIST    prefill:N and decode:PAST, default prefill:128,prefill:512,decode:0,decode:2048;
                   or none
  --batches LIST   how many sequences kvc and llama decode together (1,4,16,32), or none
  --past N         positions of each sequence of a batch (64)
  --tokens N       tokens that a turn decodes, of each sequence (16)
  --turns N        counted turns of each engine (5); one before them is not counted
  --patience S     seconds of a phase in which rounds are repeated, and waited with, that other
                   programs disturbed (60)
  --threads N      of each engine (2)
  --kv TYPE        f16 (llama.cpp's default) or f32, the type of K and V in all engines
  --csv FILE       writes the figures there as well
  --verbose        what the engines say of themselves at the start`;

const PAUSE_MS = 20;    // between turns: time to fall asleep
const LISTEN_MS = 500;  // how long nothing else must happen before a turn is repeated
const CLOCK_TICK_MS = 10;
const DISTURBED = {share: 0.1, ms: 20};     // of one core's time, used by others: both exceeded
const HERE = import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname);

/* ---- engines ---- */

async function startEngine(name, command, args) {
    const child = spawn(command, args, {stdio: ["pipe", "pipe", "inherit"]});
    await once(child, "spawn");
    const lines = readline.createInterface({input: child.stdout})[Symbol.asyncIterator]();
    const engine = {name, child, lines};
    engine.ready = await nextLine(engine);
    return engine;
}

async function nextLine(engine) {
    const {value, done} = await engine.lines.next();
    if (done) throw new Error(`${engine.name} ended early`);
    if (value.startsWith("error")) throw new Error(`${engine.name} refused: ${value}`);
    return value;
}

/* The answer in milliseconds. */
async function askEngine(engine, line) {
    engine.child.stdin.write(line + "\n");
    return Number(await nextLine(engine));
}

async function stopEngine(engine) {
    const ended = once(engine.child, "exit");
    engine.child.stdin.end("quit\n");
    await ended;
}

/* ---- who uses the processor ---- */

function readProc(name) {
    const file = `/proc/${name}`;
    return fs.existsSync(file) ? fs.readFileSync(file, "utf8") : "";
}

function sum(values) {
    return values.reduce((a, b) => a + b, 0);
}

/* Milliseconds of processor time that a program has used, in steps of a clock tick; 0 where there
   is no /proc. */
function timeUsedBy(pid) {
    const fields = readProc(`${pid}/stat`).replace(/^.*\) /s, "").split(" ");
    return sum(fields.slice(11, 13).map(Number)) * CLOCK_TICK_MS;
}

/* The same for the whole machine: user, nice, system, irq, softirq and stolen time. */
function timeUsedByAll() {
    const fields = readProc("stat").split("\n")[0].split(/ +/).slice(1).map(Number);
    return sum([0, 1, 2, 5, 6, 7].map((i) => fields[i] ?? 0)) * CLOCK_TICK_MS;
}

function takeStock(engines) {
    const each = engines.map((e) => timeUsedBy(e.child.pid));
    return {time: performance.now(), each, all: timeUsedByAll(), own: timeUsedBy(process.pid)};
}

/* ---- one phase ---- */

function parsePhase(text, nDecoded) {
    const [, kind, digits] = /^(prefill|decode):(\d+)$/.exec(text) ?? [];
    const number = Number(digits);
    if (kind === "prefill" && number > 0) {
        return {kind, seqs: 1, past: 0, tokens: number, line: `prefill ${number}`};
    }
    if (kind === "decode") {
        const line = `decode ${number} ${nDecoded}`;
        return {kind, seqs: 1, past: number, tokens: nDecoded, line};
    }
    throw new Error(`--phases: ${text}`);
}

function parseBatch(text, past, nDecoded) {
    const seqs = /^\d+$/.test(text) ? Number(text) : 0;
    if (seqs === 0) throw new Error(`--batches: ${text}`);
    return {kind: "batch", seqs, past, tokens: nDecoded, line: `batch ${seqs} ${past} ${nDecoded}`};
}

function median(values) {
    const sorted = [...values].sort((a, b) => a - b);
    const middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/* One turn of engine i: its time, and what else used the processor meanwhile, in milliseconds. */
async function runTurn(engines, i, phase) {
    await sleep(PAUSE_MS);
    const before = takeStock(engines);
    const ms = await askEngine(engines[i], phase.line);
    const after = takeStock(engines);
    const each = after.each.map((t, j) => t - before.each[j]);
    const waiting = sum(each) - each[i];
    const others = after.all - before.all - sum(each) - (after.own - before.own);
    return {ms, waiting, others, wall: after.time - before.time};
}

function isDisturbed(turn) {
    return turn.others > DISTURBED.ms && turn.others > DISTURBED.share * turn.wall;
}

/* Returns when other programs leave the processor alone, at the latest at the deadline. */
async function waitForQuiet(engines, deadline) {
    while (performance.now() < deadline) {
        const before = takeStock(engines);
        await sleep(LISTEN_MS);
        if (takeStock(engines).all - before.all < DISTURBED.share * LISTEN_MS) return;
    }
}

/* The engines take turns; the first turn of each touches memory and is not counted. A round in
   which other programs took processor time is repeated as long as the patience lasts. */
async function runPhase(engines, phase, settings) {
    const rounds = [];
    const deadline = performance.now() + settings.patience * 1e3;
    for (const engine of engines) await askEngine(engine, phase.line);
    while (rounds.length < settings.turns) {
        const round = [];
        for (let i = 0; i < engines.length; i++) round.push(await runTurn(engines, i, phase));
        if (round.some(isDisturbed) && performance.now() < deadline) {
            await waitForQuiet(engines, deadline);
        } else {
            rounds.push(round);
        }
    }
    return summarizePhase(engines, phase, rounds);
}

function summarizePhase(engines, phase, rounds) {
    const all = rounds.flat(), wall = sum(all.map((turn) => turn.wall));
    const row = {
        phase,
        waiting: sum(all.map((turn) => turn.waiting)) / wall,
        others: Math.max(0, sum(all.map((turn) => turn.others))) / wall
    };
    engines.forEach((engine, i) => {
        const times = rounds.map((round) => round[i].ms), tokens = phase.seqs * phase.tokens;
        row[engine.name] = {
            speed: tokens * 1e3 / median(times),
            best: tokens * 1e3 / Math.min(...times)
        };
    });
    return row;
}

/* ---- output ---- */

function ratio(row, a, b) {
    return row[a] && row[b] && row[a].speed / row[b].speed;
}

/* An engine's speed over that with one sequence. */
function ofOne(row, name) {
    return row[name] && row.one?.[name] && row[name].speed / row.one[name].speed;
}

/* Each column: tables that show it, heading of the table and of the CSV, and how to get it from a
   row. */
const COLUMNS = [
    ["phases batches", "model", "model", (r) => r.model],
    ["phases", "phase", "phase", (r) => r.phase.kind],
    ["batches", "seqs", "sequences", (r) => r.phase.seqs],
    ["phases", "past", "past", (r) => r.phase.past],
    ["phases", "tokens", "tokens", (r) => r.phase.tokens],
    ["phases batches", "kvc", "kvc_tokens_per_s", (r) => r.kvc?.speed],
    ["batches", "of one", "kvc_of_one", (r) => ofOne(r, "kvc")],
    ["phases batches", "llama", "llama_tokens_per_s", (r) => r.llama?.speed],
    ["batches", "of one", "llama_of_one", (r) => ofOne(r, "llama")],
    ["phases batches", "ratio", "kvc_over_llama", (r) => ratio(r, "kvc", "llama")],
    ["phases batches", "best kvc", "kvc_best", (r) => r.kvc?.best],
    ["phases batches", "..llama", "llama_best", (r) => r.llama?.best],
    ["phases", "node", "node_tokens_per_s", (r) => r.node?.speed],
    ["phases", "ratio", "kvc_over_node", (r) => ratio(r, "kvc", "node")],
    ["phases batches", "waiting", "waiting_share", (r) => r.waiting],
    ["phases batches", "others", "others_share", (r) => r.others]
];

function cell(value) {
    if (value === undefined) return "-";
    if (typeof value !== "number" || Number.isInteger(value)) return String(value);
    return value.toFixed(value < 100 ? 2 : 1);
}

/* Empty where there is no figure. */
function csvCell(value = "") {
    return typeof value !== "number" || Number.isInteger(value) ? value : value.toFixed(4);
}

function columnsOf(table) {
    return COLUMNS.filter(([tables]) => tables.includes(table.name));
}

function tableLine(cells) {
    return cells.map((c, i) => i === 0 ? c.padEnd(14) : c.padStart(9)).join("");
}

function csvOf(rows, settings) {
    const head = [...COLUMNS.map(([, , name]) => name), "turns", "threads", "kv"];
    const lines = rows.map((r) => [
        ...COLUMNS.map(([, , , get]) => csvCell(get(r))),
        settings.turns, settings.threads, settings.kv
    ]);
    return [head, ...lines].map((cells) => cells.join(",") + "\n").join("");
}

/* ---- one table ---- */

async function startEngines(file, table, settings) {
    const longest = Math.max(...table.phases.map((p) => p.past + p.tokens)) + 1;
    const nCtx = Math.ceil(longest / 256) * 256;
    const nSeqs = Math.max(...table.phases.map((p) => p.seqs));
    const args = [file, settings.threads, nCtx, settings.kv, nSeqs].map(String);
    const engines = [];
    for (const name of table.engines) {
        engines.push(await (name === "node"
            ? startEngine(name, process.execPath, [path.join(HERE, "node_turn.mjs"), ...args])
            : startEngine(name, path.resolve(settings.programs, `${name}_turn`), args)));
    }
    return engines;
}

async function benchModel(file, table, settings) {
    const engines = await startEngines(file, table, settings);
    const rows = [];
    if (settings.verbose) engines.forEach((e) => console.log(`# ${e.ready}`));
    for (const phase of table.phases) {
        const row = {model: path.basename(file, ".gguf"),
            ...await runPhase(engines, phase, settings)};
        rows.push(row);
        if (phase.kind === "batch") row.one = rows.find((r) => r.phase.seqs === 1);
        console.log(tableLine(columnsOf(table).map(([, , , get]) => cell(get(row)))));
    }
    for (const engine of engines) await stopEngine(engine);
    return rows;
}

/* The rows of all models. */
async function benchTable(table, settings) {
    const rows = [];
    console.log(`# ${table.title} with ${settings.threads} threads, K and V in ${settings.kv}; ` +
        `medians of ${settings.turns} alternating turns`);
    console.log(tableLine(columnsOf(table).map(([, heading]) => heading)));
    for (const file of settings.files) rows.push(...await benchModel(file, table, settings));
    return rows;
}

/* ---- options ---- */

function parseList(text, parse) {
    return text === "none" ? [] : text.split(",").map(parse);
}

/* Those that have something to measure. */
function tablesOf(values, engines) {
    const past = Number(values.past);
    const phases = {
        name: "phases", title: "tokens per second", engines,
        phases: parseList(values.phases, (text) => parsePhase(text, values.tokens))
    };
    const batches = {
        name: "batches",
        title: `tokens per second of all sequences, each behind ${past} positions,`,
        engines: engines.filter((name) => name !== "node"),
        phases: parseList(values.batches, (text) => parseBatch(text, past, values.tokens))
    };
    return [phases, batches].filter((t) => t.phases.length > 0 && t.engines.length > 0);
}

function parseSettings() {
    const text = (value) => ({type: "string", default: value});
    const {values, positionals} = parseArgs({
        allowPositionals: true,
        options: {
            phases: text("prefill:128,prefill:512,decode:0,decode:2048"), tokens: text("16"),
            batches: text("1,4,16,32"), past: text("64"), turns: text("5"),
            patience: text("60"), threads: text("2"), kv: text("f16"),
            engines: text("kvc,llama"), programs: text("."), csv: {type: "string"},
            verbose: {type: "boolean"}, help: {type: "boolean"}
        }
    });
    if (values.help) {
        console.log(HELP);
        process.exit(0);
    }
    if (positionals.length === 0) throw new Error("no model; see --help");
    for (const name of ["tokens", "turns", "threads", "patience"]) {
        if (!(Number(values[name]) >= 1)) throw new Error(`--${name}: ${values[name]}`);
        values[name] = Number(values[name]);
    }
    if (!/^\d+$/.test(values.past)) throw new Error(`--past: ${values.past}`);
    const engines = values.engines.split(",");
    const unknown = engines.find((name) => !["kvc", "llama", "node"].includes(name));
    if (unknown !== undefined) throw new Error(`--engines: ${unknown}`);
    return {...values, files: positionals, tables: tablesOf(values, engines)};
}

async function main() {
    const settings = parseSettings();
    const rows = [];
    for (const table of settings.tables) {
        if (rows.length > 0) console.log();
        rows.push(...await benchTable(table, settings));
    }
    if (settings.csv) fs.writeFileSync(settings.csv, csvOf(rows, settings));
}

try {
    await main();
} catch (error) {
    console.error(error.message);
    process.exit(2);
}
