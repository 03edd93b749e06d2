import json
import operator
import re

from scripts import make_chats
from tests.conftest import ROOT
from tests.data.chat_cases import DEFAULT
from trainer.data.chat import load_chat_format

CHATS = ROOT / "trainer/data/chats.jsonl"


def test_the_shipped_chats_are_what_their_script_writes():
    assert [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()] == make_chats.conversations()
    assert 300 <= len(make_chats.conversations()) <= 500
    assert CHATS.stat().st_size < 150_000


def test_every_shipped_chat_can_be_learned_from_in_256_tokens():
    chat = load_chat_format("llama3", DEFAULT)
    for line in CHATS.read_text().splitlines():
        document = json.loads(line)
        tokens, targets = chat.encode_document(document)
        answers = [m["content"] for m in document["messages"] if m["role"] == "assistant"]
        learned = DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target])
        assert learned == "".join(answer + "<|eot_id|>" for answer in answers)
        assert len(tokens) <= 256


def test_the_sums_in_the_shipped_chats_are_right():
    words = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
    sums = re.findall(r'"(\d+) (plus|minus|times) (\d+) is (\d+)\."', CHATS.read_text())
    assert len(sums) > 80
    assert all(words[word](int(a), int(b)) == int(result) for a, word, b, result in sums)
