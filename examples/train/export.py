"""Writes a trained state as GGUF, the evaluation as text, and a golden file for tests/oracle.c.

    export.py STATE_DIR --models DIR      tavern-f16.gguf and tavern-q8_0.gguf
    export.py STATE_DIR --eval FILE [--seed N]   held-out characters and questions
    export.py STATE_DIR --golden DIR      tavern.gguf in F32, tavern.json with PyTorch's logits
"""
import argparse
import json
import os
import struct

import numpy
import torch

from bpe import MARKERS, Tokenizer
from train import Model
from world import Dialogue, Maker

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TYPES = {"f32": (0, 0), "f16": (1, 1), "q8_0": (8, 7)}   # tensor type, general.file_type
TEMPLATE = ("{% for m in messages %}{{ '<|' + ('char' if m['role'] == 'assistant' else m['role']) + '|>' "
            "+ m['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|char|>{% endif %}")


def text(s):
    s = s.encode()
    return struct.pack("<Q", len(s)) + s


def value(kind, v):
    if kind == STRING:
        return text(v)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], v)


def entry(key, kind, v, item=None):
    if kind != ARRAY:
        return text(key) + struct.pack("<I", kind) + value(kind, v)
    return text(key) + struct.pack("<IIQ", ARRAY, item, len(v)) + b"".join(value(item, x) for x in v)


def to_q8_0(x):
    x = x.reshape(-1, 32)
    scale = (numpy.abs(x).max(1) / 127).astype(numpy.float32)
    inverse = numpy.divide(1, scale, out=numpy.zeros_like(scale), where=scale > 0)
    y = x * inverse[:, None]
    q = numpy.trunc(y + numpy.copysign(0.5, y)).astype(numpy.int8)
    return numpy.concatenate((scale.astype(numpy.float16)[:, None].view(numpy.uint8), q.view(numpy.uint8)), 1).tobytes()


def stored(x, kind):
    """GGUF type and bytes; norms stay F32."""
    if x.ndim == 1 or kind == "f32":
        return 0, x.astype("<f4").tobytes()
    return TYPES[kind][0], to_q8_0(x) if kind == "q8_0" else x.astype("<f2").tobytes()


def tensors(model):
    s, d = model.s, model.d
    q, kv = s["n_heads"] * d, s["n_kv_heads"] * d
    yield "token_embd.weight", model.embd
    for i in range(s["n_layers"]):
        b = "blk.%d." % i
        yield b + "attn_norm.weight", model.norm1[i]
        yield b + "attn_q.weight", model.qkv[i][:q]
        yield b + "attn_k.weight", model.qkv[i][q:q + kv]
        yield b + "attn_v.weight", model.qkv[i][q + kv:]
        yield b + "attn_output.weight", model.out[i]
        yield b + "ffn_norm.weight", model.norm2[i]
        yield b + "ffn_gate.weight", model.up[i][:s["n_ff"]]
        yield b + "ffn_up.weight", model.up[i][s["n_ff"]:]
        yield b + "ffn_down.weight", model.down[i]
    yield "output_norm.weight", model.norm


def metadata(model, tok, kind):
    s = model.s
    yield entry("general.architecture", STRING, "llama")
    yield entry("general.name", STRING, "tavern")
    yield entry("general.license", STRING, "mit")
    yield entry("general.file_type", U32, TYPES[kind][1])
    yield entry("llama.context_length", U32, s["n_ctx"])
    yield entry("llama.embedding_length", U32, s["n_embd"])
    yield entry("llama.block_count", U32, s["n_layers"])
    yield entry("llama.feed_forward_length", U32, s["n_ff"])
    yield entry("llama.attention.head_count", U32, s["n_heads"])
    yield entry("llama.attention.head_count_kv", U32, s["n_kv_heads"])
    yield entry("llama.attention.layer_norm_rms_epsilon", F32, s["eps"])
    yield entry("llama.rope.dimension_count", U32, model.d)
    yield entry("llama.rope.freq_base", F32, s["base"])
    yield entry("llama.vocab_size", U32, s["n_vocab"])
    yield entry("tokenizer.ggml.model", STRING, "gpt2")
    yield entry("tokenizer.ggml.pre", STRING, "gpt-2")
    yield entry("tokenizer.ggml.tokens", ARRAY, tok.tokens, STRING)
    yield entry("tokenizer.ggml.token_type", ARRAY, [3 if t in MARKERS else 1 for t in tok.tokens], I32)
    yield entry("tokenizer.ggml.merges", ARRAY, [" ".join(m) for m in tok.merges], STRING)
    yield entry("tokenizer.ggml.eos_token_id", U32, tok.end)
    yield entry("tokenizer.ggml.add_bos_token", BOOL, False)
    yield entry("tokenizer.ggml.add_eos_token", BOOL, False)
    yield entry("tokenizer.chat_template", STRING, TEMPLATE)


def write_gguf(path, model, tok, kind):
    meta = list(metadata(model, tok, kind))
    infos, data = [], b""
    for name, x in tensors(model):
        x = x.detach().numpy()
        t, body = stored(numpy.ascontiguousarray(x), kind)
        infos.append(text(name) + struct.pack("<I", x.ndim) + struct.pack("<%dQ" % x.ndim, *x.shape[::-1])
                     + struct.pack("<IQ", t, len(data)))
        data += body + bytes(-len(body) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(meta)) + b"".join(meta) + b"".join(infos)
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + data)
    print(path, os.path.getsize(path), "bytes")


def load(directory):
    state = torch.load(os.path.join(directory, "state.pt"))
    model = Model(state["shape"])
    model.load_state_dict(state["model"])
    print("%d steps, %d tokens, %.1f minutes" % (state["steps"], state["tokens"], state["seconds"] / 60))
    return model, Tokenizer.load(os.path.join(directory, "merges.json"))


# ---- the evaluation ----

def fact_end(tok, d, key):
    """Tokens up to the end of the sentence that holds this fact."""
    keys = [k for k, _ in d.c.lines]
    return 1 + len(tok.encode(" ".join(s for _, s in d.c.lines[:keys.index(key) + 1])))


def reveals(turn):
    """What a reply says of a fact: a second question about the same would not be answered from afar."""
    kind = turn.kind.replace("it_", "")
    if not turn.key.startswith("good "):
        return {turn.key}
    return {"price": {turn.key + " p"}, "lower": {turn.key + " m"},
            "offer": {turn.key + " m", turn.key + " p"}}.get(kind, {turn.key + " have"})


def item_of(tok, maker, low, high):
    """One dialogue whose last question lies low..high tokens behind its fact; None: try again. With
    high = 0 the last question has no answer in the description."""
    r = maker.r
    n = {100: r.randint(2, 6), 300: r.randint(4, 10), 600: r.randint(8, 15)}.get(high, r.randint(5, 16))
    d = Dialogue(maker, n)
    known, met = {"always", "list"}, 0
    lines = [("system", d.c.description)]
    size = 2 + len(tok.encode(d.c.description))
    least = r.randint(1, 14) if high == 0 else 0
    for i in range(40):
        t = d.ask()
        prompt = size + len(tok.encode(t.say)) + 3
        if prompt + 40 > 1000:
            return None
        new = not reveals(t) & known
        if t.kind == "player":
            met = prompt + len(tok.encode(t.reply))
        lines.append(("user", t.say))
        if high == 0 and i >= least and t.key == "" and t.kind in ("absent", "no_good", "riddle"):
            return t.kind, 0, lines, t.reply
        far = prompt - met if t.kind == "recall" and met else None
        key = t.key.replace("secret no", "secret")
        if key in [k for k, _ in d.c.lines]:
            far = prompt - fact_end(tok, d, key)
        share = {"fact": 0.5, "have": 0.1}.get(t.kind, 1)
        if high and new and far is not None and low <= far < high and r.random() < share:
            return t.kind, far, lines, t.reply
        known |= reveals(t)
        lines.append(("char", t.reply))
        size = prompt + len(tok.encode(t.reply)) + 1
    return None


def write_eval(path, tok, seed):
    maker = Maker(seed, held_out=True)
    ranges = [(0, 100)] * 45 + [(100, 300)] * 45 + [(300, 600)] * 40 + [(600, 1000)] * 40 + [(0, 0)] * 30
    with open(path, "w") as f:
        f.write("# 200 held-out characters and questions; see README.md. kind, tokens since the fact (0: unknowable)\n")
        for low, high in ranges:
            item = None
            while item is None:
                item = item_of(tok, maker, low, high)
            kind, far, lines, reply = item
            f.write("\nitem %s %d\n" % (kind, far))
            f.writelines("%s %s\n" % line for line in lines)
            f.write("want %s\n" % reply)
    print(path, os.path.getsize(path), "bytes")


# ---- against PyTorch ----

def write_golden(directory, model, tok):
    os.makedirs(directory, exist_ok=True)
    write_gguf(os.path.join(directory, "tavern.gguf"), model, tok, "f32")
    d = Dialogue(Maker(5, held_out=True), 2)
    ids = ([tok.system] + tok.encode(d.c.description) + [tok.end])[:36]
    ids = (ids + [tok.user] + tok.encode("Who are you?") + [tok.end, tok.char])[:48]
    with torch.no_grad():
        logits = model.logits(torch.tensor([ids]))[0]
        greedy = list(ids)
        for _ in range(10):
            greedy.append(int(model.logits(torch.tensor([greedy]))[0, -1].argmax()))
    at = sorted({0, 1, 7, 23, len(ids) - 1})
    golden = {"arch": "llama", "prompt": ids, "greedy": greedy[len(ids):], "positions": at, "tolerance": 1e-3,
              "logits": [[float(x) for x in logits[i]] for i in at]}
    with open(os.path.join(directory, "tavern.json"), "w") as f:
        json.dump(golden, f)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("state")
    a.add_argument("--models")
    a.add_argument("--eval")
    a.add_argument("--golden")
    a.add_argument("--seed", type=int, default=20261129, help="of the evaluation")
    a = a.parse_args()
    torch.set_num_threads(1)
    model, tok = load(a.state)
    if a.models:
        write_gguf(os.path.join(a.models, "tavern-f16.gguf"), model, tok, "f16")
        write_gguf(os.path.join(a.models, "tavern-q8_0.gguf"), model, tok, "q8_0")
    if a.eval:
        write_eval(a.eval, tok, a.seed)
    if a.golden:
        write_golden(a.golden, model, tok)


if __name__ == "__main__":
    main()
