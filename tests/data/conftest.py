import pytest

from tests.data.chat.examples import CHATML, DEFAULT, train_sentencepiece
from trainer.data.chat.format import load_chat_format


@pytest.fixture(scope="session")
def char_tokenizer(tmp_path_factory):
    """Each character is one token."""
    return train_sentencepiece(tmp_path_factory.mktemp("char"), "char")


@pytest.fixture(scope="session")
def bpe_tokenizer(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("bpe"), "bpe")


@pytest.fixture(scope="session")
def llama3():
    return load_chat_format("llama3", DEFAULT)


@pytest.fixture(scope="session")
def chatml():
    return load_chat_format("chatml", CHATML)


@pytest.fixture(params=["llama2", "llama2 char", "llama2 bpe", "llama3", "chatml"])
def any_chat_format(request, char_tokenizer, bpe_tokenizer, llama3, chatml):
    return {
        "llama2": lambda: load_chat_format("llama2", DEFAULT),
        "llama2 char": lambda: load_chat_format("llama2", char_tokenizer),
        "llama2 bpe": lambda: load_chat_format("llama2", bpe_tokenizer),
        "llama3": lambda: llama3,
        "chatml": lambda: chatml,
    }[request.param]()
