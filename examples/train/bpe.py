"""A byte-level BPE tokenizer: training, encoding, and the lists that a GGUF file wants.

Text is cut as GPT-2 does (for ASCII), then the most frequent pair of pieces becomes a token, again
and again. The numbers 1 to 99 become tokens before all others, so that a number is one token.
"""
import collections
import json
import re

MARKERS = ["<|system|>", "<|user|>", "<|char|>", "<|end|>"]
CUT = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def byte_letters():
    """The printable character that stands for each byte in spellings."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    letters, extra = {}, 0
    for b in range(256):
        letters[b] = chr(b) if b in plain else chr(256 + extra)
        extra += b not in plain
    return letters


LETTERS = byte_letters()


def spell(text):
    return "".join(LETTERS[b] for b in text.encode())


def merged(word, pair):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def train(texts, n_vocab):
    """The list of merges, most frequent first; equal counts in order of spelling."""
    counts = collections.Counter(spell(piece) for text in texts for piece in CUT.findall(text))
    words = [list(w) for w in counts]
    weight = list(counts.values())
    space = LETTERS[32]
    first = [(space, str(d)) for d in range(1, 10)]
    first += [(space + str(d), str(e)) for d in range(1, 10) for e in range(10)]
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, w in enumerate(words):
        for p in zip(w, w[1:]):
            pairs[p] += weight[i]
            where[p].add(i)
    merges = []
    while len(merges) < n_vocab - 256 - len(MARKERS):
        pair = first[len(merges)] if len(merges) < len(first) else max(pairs.items(), key=lambda x: (x[1], x[0]))[0]
        merges.append(pair)
        for i in list(where[pair]):
            w = words[i]
            for p in zip(w, w[1:]):
                pairs[p] -= weight[i]
            words[i] = w = merged(w, pair)
            for p in zip(w, w[1:]):
                pairs[p] += weight[i]
                where[p].add(i)
    return merges


class Tokenizer:
    """Ids: the control tokens, the 256 bytes, then one token for each merge."""

    def __init__(self, merges):
        self.merges = [tuple(m) for m in merges]
        self.rank = {m: i for i, m in enumerate(self.merges)}
        self.tokens = MARKERS + [LETTERS[b] for b in range(256)] + [a + b for a, b in self.merges]
        self.id = {t: i for i, t in enumerate(self.tokens)}
        self.system, self.user, self.char, self.end = range(4)
        self.cache = {}
        self.bytes = {c: b for b, c in LETTERS.items()}

    def piece(self, text):
        ids = self.cache.get(text)
        if ids is None:
            word = list(spell(text))
            while len(word) > 1:
                best = min(zip(word, word[1:]), key=lambda p: self.rank.get(p, 1 << 30))
                if best not in self.rank:
                    break
                word = merged(word, best)
            ids = self.cache[text] = [self.id[t] for t in word]
        return ids

    def encode(self, text):
        return [i for piece in CUT.findall(text) for i in self.piece(piece)]

    def decode(self, ids):
        data = bytes(self.bytes[c] for i in ids if i >= 4 for c in self.tokens[i])
        return data.decode("utf-8", "replace")

    def save(self, path):
        with open(path, "w") as f:
            json.dump(self.merges, f)

    @staticmethod
    def load(path):
        with open(path) as f:
            return Tokenizer(json.load(f))
