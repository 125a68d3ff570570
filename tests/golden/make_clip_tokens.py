"""Golden token ids of OpenCLIP's tokenizer, and their captions.

    python tests/golden/make_clip_tokens.py

Needs open_clip_torch, ftfy and regex, but not PyTorch. The stored file is from open_clip_torch 3.3.0, ftfy 6.3.1, regex
2026.11.15 and Python 3.12.1.
"""

# ruff: noqa: RUF001

import hashlib
import importlib.util
import itertools
import sys
import types
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("clip_tokens.npz")
COUNT = 12_000
# Text cleaning, context length, and which captions: each of them, or each eighth.
CASES = (("lower", 77, 1), ("lower", 16, 8), ("whitespace", 77, 8), ("canonicalize", 77, 8))
_DIGEST = 4  # bytes of each digest

_NOUNS = (
    "dog",
    "cat",
    "bicycle",
    "skyscraper",
    "harbour",
    "watercolour",
    "motherboard",
    "giraffe",
    "croissant",
    "lighthouse",
    "jeans",
    "t-shirt",
)
_ADJECTIVES = (
    "red",
    "vintage",
    "hand-made",
    "19th-century",
    "blurry",
    "4K",
    "anti-aliased",
    "iridescent",
    "low-res",
    "Scandinavian",
)
_TEMPLATES = (
    "a photo of a {a} {n}",
    "A {a}, {a} {n} next to the {n}.",
    "{n} | {n} - buy {d} online, ${d}.{d}!",
    "I don't think it's a {n}; they'll say we've {d} {n}s, I'm sure you'd AGREE",
    "IMG_{d}.JPG",
    "https://www.example.com/{n}?id={d}&amp;colour={a}#{n}",
    "{n}s' {n}'s 'S 'RE 'Ll o'{n} ''{a}'' `{n}`",
    "{a}_{n}__{a} ({d}x{d}) [{n}] {{{a}}} <{n}> @{n} #{a} {d}% *{n}*",
    "<start_of_text>{n}<end_of_text> {a} <START_OF_TEXT> <|endoftext|> </w> {n}</w>",
    "the {n}{n}{n}{a}{n}{d}{n}{a}",
)
_ENTITIES = (
    "&amp;",
    "&lt;b&gt;",
    "&#39;tis",
    "&amp;amp;",
    "&eacute;t&eacute;",
    "&nbsp;",
    "&#x1F600;",
    "&notanentity;",
    "&amp;lt;",
    "&quot;x&quot;",
    "&copy",
)
UNICODE = (
    "😀😂🤣 👩‍👩‍👧‍👦 🇫🇷🇯🇵 👍🏽 ❤️ ✈️ 🏳️‍🌈 ♥ ☃ ™ ©",
    "一只戴着帽子的猫坐在窗台上",
    "夕暮れの東京タワーとﾊﾝｶｸｶﾅ、ＦＵＬＬＷＩＤＴＨ １２３",
    "한국의 가을 단풍 사진 ㅋㅋㅋ",
    "Рыжий кот сидит на окне, ёлка",
    "ΟΔΥΣΣΕΎΣ ΣΑΣ σας ΌΣΟΣ",
    "صورة قطة ١٢٣ على الطاولة",
    "ภาพแมวน่ารักบนโต๊ะ",
    "खिड़की पर बैठी बिल्ली",
    "חתול על החלון שָׁלוֹם",
    "İstanbul'da IĞDIR ışık ſtraße GROẞ ﬁne ﬂow Ǆ",
    "cafe\u0301 na\u00efve Z\u0324\u0310a\u0334\u0319l\u0335go x\u00b2 \u00bd \u2167 \u2460",
    "schÃ¶n cafÃ© â€œquotedâ€\x9d â€” Ã±andÃº l’Ã©tÃ© ð\x9f\x98\x80",
    "“curly” ‘quotes’ – — … « guillemets » ‚low‛",
    "\u200bzero\u200cwidth\u200d\ufeffjoiners\u00adsoft \u202eright to left\u202c",
    "\U0001d4d2\U0001d4f8\U0001d4f8\U0001d4f5 \U00010400\U00010428 \U0001f9ff\U000e0067 \ufffd \uf8ff",
)
_SPACES = (
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
    "\x85",
    "\x0b\x0c",
    " \t \n ",
    "\x1c\x1f",
)
_CONTROLS = ("\x00", "\x07", "\x1b[31m", "\x7f", "\x80", "\x9f", "\x08", "\u2066", "\ufffe")
# First and last code points of assigned characters. Later versions of Unicode do not change these blocks.
_RANGES = ((33, 126), (161, 591), (880, 887), (1024, 1279), (1488, 1514), (2309, 2361), (8192, 8286), (8531, 8580))
_RANGES += ((8704, 8959), (9728, 9983), (12353, 12435), (12449, 12538), (19968, 40000), (44032, 55203), (65281, 65470))
_RANGES += ((119808, 119892), (128512, 128580), (131072, 131200))


class _Random:
    """Random integers from the bit stream of PCG64, which NumPy guarantees."""

    def __init__(self, seed: int):
        bits = np.random.PCG64(seed)
        blocks = (bits.random_raw(2**12) >> np.uint64(11) for _ in itertools.count())
        self._words = itertools.chain.from_iterable(block.tolist() for block in blocks)

    def below(self, stop: int) -> int:
        return next(self._words) % stop

    def choice(self, items):
        return items[self.below(len(items))]


def _sentence(random: _Random) -> str:
    """Fill in a template."""
    text = random.choice(_TEMPLATES)
    for field, values in (("{a}", _ADJECTIVES), ("{n}", _NOUNS)):
        while field in text:
            text = text.replace(field, random.choice(values), 1)
    while "{d}" in text:
        text = text.replace("{d}", str(random.below(10 ** (1 + random.below(5)))), 1)
    return text


def _characters(random: _Random) -> str:
    """Random characters, letters, marks, symbols and spaces."""
    ranges = [random.choice(_RANGES) for _ in range(1 + random.below(40))]
    return "".join(chr(first + random.below(last - first + 1)) for first, last in ranges)


def _letters(random: _Random) -> str:
    """A random word, which no list of words has."""
    return "".join(chr(97 + random.below(26)) for _ in range(1 + random.below(30)))


def _mixed(random: _Random) -> str:
    """Several kinds of text with unusual whitespace and control characters between them."""
    kinds = (_sentence, _letters, _characters, lambda r: r.choice(UNICODE), lambda r: r.choice(_ENTITIES))
    text = "".join(random.choice(kinds)(random) + random.choice(_SPACES) for _ in range(1 + random.below(6)))
    if random.below(4) == 0:
        text = text[: random.below(len(text) + 1)] + random.choice(_CONTROLS) + text[random.below(len(text) + 1) :]
    return text


def captions(count: int = COUNT) -> list[str]:
    """Return plain, web, multilingual, damaged, empty and very long captions."""
    random = _Random(0)
    fixed = ["", " ", "\n\t", "\x00", "&", "'", "_", "a", "é", "😀", "x" * 3000, "猫" * 1500, "a b " * 2000, "!?" * 900]
    fixed += ["\u00e9" * 600, "1" * 300, *UNICODE, *_ENTITIES, *(f"a{space}b" for space in _SPACES)]
    fixed += [f"a{control}b" for control in _CONTROLS] + [chr(code) for code in range(1, 256)]
    kinds = (_sentence, _sentence, _mixed, _characters, lambda r: " ".join(_mixed(r) for _ in range(3)))
    return (fixed + [random.choice(kinds)(random) for _ in range(count - len(fixed))])[:count]


def digests(ids: np.ndarray) -> np.ndarray:
    """Return a digest of each row, uint32 [n], of integers [n, length]."""
    rows = np.ascontiguousarray(ids, dtype="<i4")
    data = b"".join(hashlib.sha256(row.tobytes()).digest()[:_DIGEST] for row in rows)
    return np.frombuffer(data, "<u4")


def digest_of_texts(texts: list[str]) -> str:
    """Return the SHA-256 of texts, in hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _open_clip_tokenizer_module() -> types.ModuleType:
    """Load OpenCLIP's tokenizer.py alone, with NumPy in place of PyTorch."""
    torch = types.ModuleType("torch")
    torch.Tensor = torch.LongTensor = np.ndarray
    torch.long = np.int64
    torch.zeros = lambda *shape, dtype: np.zeros(shape, dtype)
    torch.tensor = lambda values: np.array(values, np.int64)
    sys.modules["torch"] = torch
    (folder,) = importlib.util.find_spec("open_clip").submodule_search_locations
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", Path(folder) / "tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run OpenCLIP's tokenizer and write the golden file."""
    tokenizer = _open_clip_tokenizer_module().SimpleTokenizer
    texts = captions()
    cases = {
        f"{clean}_{length}": digests(tokenizer(context_length=length, clean=clean)(texts[::step]))
        for clean, length, step in CASES
    }
    np.savez_compressed(PATH, captions=digest_of_texts(texts), **cases)


if __name__ == "__main__":
    main()
