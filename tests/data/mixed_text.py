"""Text that brings out what differs between tokenizers."""

import random

SCRIPTS = (
    "the quick brown fox isn't We'RE I'll",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\tif x == 0x1F:\n\t\tpass",
    "SELECT * FROM t WHERE a >= 10.5e-3;",
    '{"key": [1, 2.0, null, true]}',
    "<div class='a'>&nbsp;</div>",
    "Größe naïve façade œuvre Łódź İstanbul ǅ",
    "Привет, мир. Ёлка",
    "世界和平。日本語テキスト カタカナ 한국어 텍스트",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया ไทยภาษา",
    "e\u0301 a\u0308 n\u0303 \u1e9b\u0323",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪❤️",
    "\U0001d518\U0001d52b\U0001d526 ﬁ ½ Ⅳ ① ٣ १२३",
    "1234567890 3.14159 1,000,000 0x00FF 1st",
    "\x00\x01\x07\x1b[31m\x7f\x80\x9f\u00ad",
    "\u200b\u200d\ufeff\u2028\u2029\u00a0\u3000\u2003",
    "\ufffd\ufffd",
    "<|begin_of_text|><|end_of_text|><|eot_id|><|reserved_special_token_0|>",
    "<s></s><unk>[INST] <<SYS>> <0x0A> <|im_start|>",
    "\r\n\r\r\n\n\n",
    "don't DON'T 'sss ''s y'all's",
    "!!!...???---___***///\\\\\\",
)


EVERYTHING = [*range(0xD800), *range(0xE000, 0x30000)]
"""Characters, many of them of no script."""


def mixed_text(size: int, seed: int) -> str:
    """At least so many bytes in UTF-8."""
    draw = random.Random(seed)
    pieces, length = [], 0
    while length < size:
        kind = draw.randrange(10)
        if kind < 6:
            words = draw.choice(SCRIPTS).split(" ")
            piece = draw.choice((" ", "  ", "\n", "")).join(draw.choices(words, k=draw.randrange(1, 12)))
        elif kind == 6:
            piece = draw.choice(" \n\t\r=-.a0世") * draw.choice((2, 3, 7, 30, 300))
        elif kind == 7:
            piece = draw.randbytes(draw.randrange(1, 40)).decode("utf-8", errors="replace")
        elif kind == 8:
            piece = "".join(map(chr, draw.choices(EVERYTHING, k=draw.randrange(1, 12))))
        else:
            piece = draw.choice(SCRIPTS) + draw.choice(("", " ", "\n", "\n\n   "))
        pieces.append(piece)
        length += len(piece.encode())
    return "".join(pieces)


def documents(total: int, size: int = 20_000) -> list[str]:
    return [mixed_text(size, seed) for seed in range(-(-total // size))]
