"""Random text in which tokenizers tend to differ: many scripts, code, control characters, long runs."""

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

ALL_CHARACTERS = [*range(0xD800), *range(0xE000, 0x30000)]


def random_text(num_bytes: int, seed: int) -> str:
    """Return at least num_bytes of text in UTF-8."""
    generator = random.Random(seed)
    pieces, length = [], 0
    while length < num_bytes:
        category = generator.randrange(10)
        if category < 6:
            words = generator.choice(SCRIPTS).split(" ")
            piece = generator.choice((" ", "  ", "\n", "")).join(generator.choices(words, k=generator.randrange(1, 12)))
        elif category == 6:
            piece = generator.choice(" \n\t\r=-.a0世") * generator.choice((2, 3, 7, 30, 300))
        elif category == 7:
            piece = generator.randbytes(generator.randrange(1, 40)).decode("utf-8", errors="replace")
        elif category == 8:
            piece = "".join(map(chr, generator.choices(ALL_CHARACTERS, k=generator.randrange(1, 12))))
        else:
            piece = generator.choice(SCRIPTS) + generator.choice(("", " ", "\n", "\n\n   "))
        pieces.append(piece)
        length += len(piece.encode())
    return "".join(pieces)


def random_documents(total_bytes: int, document_bytes: int = 20_000) -> list[str]:
    return [random_text(document_bytes, seed) for seed in range(-(-total_bytes // document_bytes))]
