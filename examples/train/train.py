"""Trains the tavern model on the CPU. Everything random comes from --seed.

    train.py --out DIR --steps N | --minutes M [--stop N] [--resume] [--seed S]

Matrices inside the layers are trained with Muon (momentum whose steps are made orthogonal by a
Newton-Schulz iteration; Jordan et al. 2024), the rest with Adam. Lessons grow: short descriptions
with a few questions first, then longer ones, up to the full context. The loss counts replies, and a
few of the other tokens.
"""
import argparse
import math
import os
import time

import torch
import torch.nn.functional as F

from bpe import Tokenizer, train as train_bpe
from world import HARD, PLAIN, Dialogue, Maker

SHAPE = dict(n_vocab=1280, n_embd=128, n_layers=5, n_heads=4, n_kv_heads=2, n_ff=352, n_ctx=1024, eps=1e-5,
             base=1000000.0)


def rope_table(s, n):
    d = s["n_embd"] // s["n_heads"]
    freq = s["base"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * freq
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rms(x, w, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


class Model(torch.nn.Module):
    """The llama architecture; heads turn the numbers 2i and 2i + 1 together, as GGUF wants."""

    def __init__(self, s):
        super().__init__()
        self.s = s
        e, f, n = s["n_embd"], s["n_ff"], s["n_layers"]
        self.d = e // s["n_heads"]
        kv = s["n_kv_heads"] * self.d
        P, N = torch.nn.Parameter, torch.randn
        self.embd = P(N(s["n_vocab"], e) * 0.5)
        self.qkv = torch.nn.ParameterList([P(N(e + 2 * kv, e) * e ** -0.5) for _ in range(n)])
        self.out = torch.nn.ParameterList([P(N(e, e) * e ** -0.5 / math.sqrt(2 * n)) for _ in range(n)])
        self.up = torch.nn.ParameterList([P(N(2 * f, e) * e ** -0.5) for _ in range(n)])
        self.down = torch.nn.ParameterList([P(N(e, f) * f ** -0.5 / math.sqrt(2 * n)) for _ in range(n)])
        self.norm1 = torch.nn.ParameterList([P(torch.ones(e)) for _ in range(n)])
        self.norm2 = torch.nn.ParameterList([P(torch.ones(e)) for _ in range(n)])
        self.norm = P(torch.full((e,), 0.25))
        self.rope = rope_table(s, s["n_ctx"])
        with torch.no_grad():
            self.plant()

    def plant(self):
        """Starts the first two layers as an induction circuit (Olsson et al. 2022), which plain random
        weights take millions of tokens to find: layer 0 writes down the token before, layer 1 looks for
        where the present token stood before and copies what came after. All of it is trained further.
        Of the residual stream, number 0 is a constant, 1..79 the token, 80..127 the token before."""
        d, h = self.d, self.s["n_heads"]
        kv = self.s["n_kv_heads"]
        word, before = slice(1, 80), 80
        self.embd[:, before:] = 0
        self.embd[:, 0] = 1.5
        read = torch.randn(kv, 24, 79) * 79 ** -0.5
        copy = torch.linalg.qr(torch.randn(79, kv * d))[0].T
        angle = self.s["base"] ** (-torch.arange(4) * 2.0 / d)
        w, o = self.qkv[0], self.out[0]
        for head in range(h):
            far = 1 + head % 2            # heads look one or two tokens back
            w[head * d:(head + 1) * d] *= 0.3
            w[head * d:head * d + 8] = 0
            w[head * d:head * d + 8:2, 0] = 2.5 * (angle * far).cos()
            w[head * d + 1:head * d + 8:2, 0] = -2.5 * (angle * far).sin()
        for g in range(kv):
            k, v = (h + g) * d, (h + kv + g) * d
            w[k:k + 8] = 0
            w[k:k + 8:2, 0] = 2.5
            w[v:v + 24] = 0
            w[v:v + 24, word] = read[g]
            o[before:] = 0 if g == 0 else o[before:]
            for j in range(24):
                o[before + 24 * g + j, 2 * g * d + j] = 0.6
        w, o = self.qkv[1], self.out[1]
        for head in range(h):
            g = head // (h // kv)
            w[head * d:(head + 1) * d] *= 0.3
            w[head * d + 16:head * d + 32] = 0
            w[head * d + 16:head * d + 32, word] = 2.6 * read[g, :16]
            o[word, head * d:(head + 1) * d] += 1.2 * copy[g * d:(g + 1) * d].T
        for g in range(kv):
            k, v = (h + g) * d, (h + kv + g) * d
            w[k:k + 32] *= 0.3
            w[k + 16:k + 32] = 0
            for j in range(16):
                w[k + 16 + j, before + 24 * g + j] = 2.6
            w[v:v + d] = 0
            w[v:v + d, word] = copy[g * d:(g + 1) * d]

    def turn(self, x, at):
        """x [n, t, heads, d], the first row at position `at`."""
        z = torch.view_as_complex(x.unflatten(-1, (self.d // 2, 2))) * self.rope[at:at + x.shape[1], None]
        return torch.view_as_real(z).flatten(-2)

    def attend(self, x, layer, mask, past):
        s, d = self.s, self.d
        n, t, e = x.shape
        h, kv = s["n_heads"], s["n_kv_heads"]
        at = past[layer][0].shape[2] if past is not None and past[layer] else 0
        qk, v = F.linear(x, self.qkv[layer]).view(n, t, h + 2 * kv, d).split((h + kv, kv), 2)
        q, k = self.turn(qk, at).transpose(1, 2).split((h, kv), 1)
        q, v = q * d ** -0.5, v.transpose(1, 2)
        if past is not None:
            if past[layer]:
                k, v = torch.cat((past[layer][0], k), 2), torch.cat((past[layer][1], v), 2)
            past[layer] = (k, v)
        q = q.reshape(n, kv, h // kv * t, d)
        p = (q @ k.transpose(2, 3)).view(n, kv, h // kv, t, -1) + mask
        p = torch.softmax(p, -1).view(n, kv, h // kv * t, -1)
        y = (p @ v).view(n, h, t, d).transpose(1, 2).reshape(n, t, e)
        return F.linear(y, self.out[layer])

    def hidden(self, ids, mask=None, past=None):
        x = self.embd[ids]
        if mask is None:
            mask = torch.full((ids.shape[1], ids.shape[1]), -1e9).triu(1)
        for i in range(self.s["n_layers"]):
            x = x + self.attend(rms(x, self.norm1[i], self.s["eps"]), i, mask, past)
            g, u = F.linear(rms(x, self.norm2[i], self.s["eps"]), self.up[i]).chunk(2, -1)
            x = x + F.linear(F.silu(g) * u, self.down[i])
        return rms(x, self.norm, self.s["eps"])

    def logits(self, ids):
        return F.linear(self.hidden(ids), self.embd)

    @torch.no_grad()
    def reply(self, prompts, end, n=48):
        """Greedy replies to prompts of any lengths, all at once."""
        out = []
        for ids in prompts:
            past = [None] * self.s["n_layers"]
            x, got = torch.tensor([ids]), []
            while len(got) < n:
                mask = None if not got else torch.zeros(1, 1)
                token = int((self.hidden(x, mask, past)[0, -1] @ self.embd.T).argmax())
                if token == end:
                    break
                got.append(token)
                x = torch.tensor([[token]])
            out.append(got)
        return out


class Muon:
    """For matrices; those of one shape are treated together."""

    def __init__(self, params, momentum=0.95):
        self.groups, self.momentum = {}, momentum
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.state = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, params in self.groups.items():
            g = torch.stack([p.grad for p in params])
            m = self.state[shape].lerp_(g, 1 - self.momentum)
            g = g.lerp(m, self.momentum)
            tall = shape[0] > shape[1]
            x = g.transpose(1, 2) if tall else g
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-9)
            for _ in range(5):
                a = x @ x.transpose(1, 2)
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.transpose(1, 2) if tall else x
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, step in zip(params, x):
                p.mul_(1 - lr * 0.01).sub_(step, alpha=scale)


def document(tok, d, n_turns, limit):
    """Token ids of a dialogue, and which of them are to be learnt (1) or only now and then (0)."""
    ids = [tok.system] + tok.encode(d.c.description) + [tok.end]
    learn = [0] * len(ids)
    for _ in range(n_turns):
        t = d.ask()
        say = [tok.user] + tok.encode(t.say) + [tok.end, tok.char]
        reply = tok.encode(t.reply) + [tok.end]
        if len(ids) + len(say) + len(reply) > limit:
            break
        ids += say + reply
        learn += [0] * len(say) + [1] * len(reply)
    return ids, learn


def lesson(tok, maker, level, mix):
    """One document; level from 0 to 1 is how far the course has come."""
    r = maker.r
    if level < 0.3 or r.random() < 0.3:
        facts, turns, limit = r.randint(1, 4), r.randint(3, 6), 220
    elif level < 0.6 or r.random() < 0.6:
        facts, turns, limit = r.randint(3, 10), r.randint(4, 12), 480
    else:
        facts, turns, limit = r.randint(6, 16), r.randint(8, 34), 1024
    while True:
        ids, learn = document(tok, Dialogue(maker, facts, mix), turns, limit)
        if any(learn):
            return ids, learn


def batches(tok, maker, level, n_tokens, mix, pool=192):
    """Endless batches (ids, learn) of about n_tokens, padded; documents of like length together."""
    while True:
        docs = sorted((lesson(tok, maker, level(), mix) for _ in range(pool)), key=lambda d: len(d[0]))
        made, batch = [], []
        for d in docs:
            if batch and (len(batch) + 1) * len(d[0]) > n_tokens:
                made.append(batch)
                batch = []
            batch.append(d)
        made.append(batch)
        maker.r.shuffle(made)
        for b in made:
            n = max(len(d[0]) for d in b)
            yield (torch.tensor([d[0] + [tok.end] * (n - len(d[0])) for d in b]),
                   torch.tensor([d[1] + [-1] * (n - len(d[1])) for d in b]))


def probes(tok, n, seed):
    """Held-out questions: (kind, prompt ids, reply ids, distance)."""
    maker, out = Maker(seed, held_out=True), []
    while len(out) < n:
        facts, turns = maker.r.choice([(3, 1), (8, 5), (12, 12), (14, 22)])
        d = Dialogue(maker, facts)
        ids = [tok.system] + tok.encode(d.c.description) + [tok.end]
        for _ in range(turns):
            t = d.ask()
            last, ids = ids, ids + [tok.user] + tok.encode(t.say) + [tok.end, tok.char]
            prompt, reply = ids, tok.encode(t.reply)
            ids = ids + reply + [tok.end]
        if len(ids) < 1000:
            out.append((t.kind, prompt, reply))
    return out


def score(model, tok, items):
    good, kinds = 0, {}
    for (kind, prompt, reply), got in zip(items, model.reply([i[1] for i in items], tok.end)):
        k = kinds.setdefault(kind, [0, 0])
        k[1] += 1
        k[0] += got == reply
        good += got == reply
    return good / len(items), kinds


class Course:
    """What the processes share: gradients, two sets in turn so that one barrier a step is enough."""

    def __init__(self, a, n_params):
        import torch.multiprocessing as mp
        self.grads = torch.zeros(2, a.processes, n_params).share_memory_()
        self.progress = torch.zeros(2, 2, dtype=torch.float64).share_memory_()
        self.barrier = mp.Barrier(a.processes)


def learn_batch(model, ids, learn):
    """Gradients of one batch; the losses of the tokens of replies."""
    x, y, w = ids[:, :-1], ids[:, 1:].reshape(-1), learn[:, 1:].reshape(-1)
    chosen = ((w == 1) | ((w == 0) & (torch.rand(w.shape) < 0.1))).nonzero()[:, 0]
    weight = torch.where(w[chosen] == 1, 1.0, 0.3)
    h = model.hidden(x).reshape(-1, SHAPE["n_embd"])[chosen]
    each = F.cross_entropy(F.linear(h, model.embd), y[chosen], reduction="none")
    model.zero_grad(set_to_none=True)
    ((each * weight).sum() / weight.sum()).backward()
    return each.detach()[w[chosen] == 1]


def exchange(course, params, rank, step):
    """Puts the mean of all processes' gradients into this one's."""
    side = course.grads[step % 2]
    torch.cat([p.grad.reshape(-1) for p in params], out=side[rank])
    course.barrier.wait()
    mean, at = side.mean(0), 0
    for p in params:
        p.grad = mean[at:at + p.numel()].view_as(p)
        at += p.numel()


def work(rank, a, course, tok):
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    model = Model(SHAPE)
    params = list(model.parameters())
    matrices = [p for ps in (model.qkv, model.out, model.up, model.down) for p in ps]
    rest = [p for p in params if not any(p is m for m in matrices)]
    muon, adam = Muon(matrices), torch.optim.Adam(rest, lr=a.lr_rest, betas=(0.9, 0.98))
    done = {"steps": 0, "tokens": 0, "seconds": 0.0}
    if a.resume:
        done = torch.load(os.path.join(a.out, "state.pt"))
        model.load_state_dict(done["model"])
    torch.manual_seed(a.seed * 1000 + 500 * a.resume + rank)
    items = probes(tok, 40, 999)
    start = saved = told = time.time()
    step, seen, last, total, n_total, p, level, recent = 0, 0, 0, 0.0, 0, 0.0, float(a.resume), 3.0
    maker = Maker(a.seed * 1000 + 500 * a.resume + rank)
    course_batches = batches(tok, maker, lambda: level, a.tokens, HARD if a.resume else PLAIN)
    while True:
        ids, learn = next(course_batches)
        losses = learn_batch(model, ids, learn)
        if rank == 0:
            recent += 0.02 * (float(losses.mean()) - recent)
            level = max(p, level + 0.002 * (recent < 0.3))
            course.progress[step % 2, 0] = step / a.steps if a.steps else (time.time() - start) / (60 * a.minutes)
            course.progress[step % 2, 1] = level
        exchange(course, params, rank, step)
        p, level = (min(1.0, float(x)) for x in course.progress[step % 2])
        scale = min(1.0, (step + 1) / 50) * min(1.0, (1 - p) / a.decay + 0.01)
        muon.step(a.lr * scale)
        for g in adam.param_groups:
            g["lr"] = a.lr_rest * scale
        adam.step()
        step += 1
        if p >= 1 or step == a.stop:
            break
        if rank:
            continue
        seen += ids.numel() * a.processes
        total += float(losses.sum())
        n_total += losses.numel()
        now = time.time()
        if now - told > 30:
            print("%5d  p %.3f  level %.2f  %.1f min  %.2f Mtok  %.0f tok/s  loss %.4f" % (
                step, p, level, (now - start) / 60, seen / 1e6, (seen - last) / (now - told),
                total / n_total), flush=True)
            total, n_total, last, told = 0.0, 0, seen, now
        if now - saved > 240:
            save(a, model, done, step, seen, now - start)
            tell_score(model, tok, items)
            saved = time.time()
    if rank == 0:
        save(a, model, done, step, seen, time.time() - start)
        print("done: %d steps, %d tokens, %.1f minutes" % (step, seen, (time.time() - start) / 60))


def save(a, model, done, step, seen, seconds):
    part = os.path.join(a.out, "part.pt")
    torch.save({"shape": SHAPE, "model": model.state_dict(), "steps": done["steps"] + step,
                "tokens": done["tokens"] + seen, "seconds": done["seconds"] + seconds}, part)
    os.replace(part, os.path.join(a.out, "state.pt"))


def tell_score(model, tok, items):
    s, kinds = score(model, tok, items)
    each = " ".join("%s %d/%d" % (k, *v) for k, v in sorted(kinds.items()))
    print("      held out %.3f  %s" % (s, each), flush=True)


def make_tokenizer(a):
    path = os.path.join(a.out, "merges.json")
    if not os.path.exists(path):
        maker, texts = Maker(a.seed), []
        for _ in range(4000):
            d = Dialogue(maker, 8)
            turns = [d.ask() for _ in range(8)]
            texts += [d.c.description] + [s for t in turns for s in (t.say, t.reply)]
        Tokenizer(train_bpe(texts, SHAPE["n_vocab"])).save(path)
    return Tokenizer.load(path)


def main():
    import torch.multiprocessing as mp
    a = argparse.ArgumentParser()
    a.add_argument("--out", required=True)
    a.add_argument("--minutes", type=float, default=0)
    a.add_argument("--steps", type=int, default=0)
    a.add_argument("--stop", type=int, default=0, help="end after this many steps")
    a.add_argument("--decay", type=float, default=0.6, help="part of the time in which the rate falls")
    a.add_argument("--resume", action="store_true", help="go on from the saved state with harder questions")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--tokens", type=int, default=3072, help="of one batch of one process")
    a.add_argument("--lr", type=float, default=0.02)
    a.add_argument("--lr-rest", type=float, default=3e-3)
    a.add_argument("--processes", type=int, default=2)
    a = a.parse_args()
    if not a.steps and not a.minutes:
        raise SystemExit("train.py: give --steps or --minutes")
    torch.set_num_threads(1)
    os.makedirs(a.out, exist_ok=True)
    tok = make_tokenizer(a)
    course = Course(a, sum(p.numel() for p in Model(SHAPE).parameters()))
    fork = mp.get_context("fork")
    workers = [fork.Process(target=work, args=(rank, a, course, tok)) for rank in range(a.processes)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()


if __name__ == "__main__":
    main()
