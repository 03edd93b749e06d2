import pytest

from tests.data.chat.chat_cases import CHATML, DEFAULT, train_sentencepiece
from trainer.data.chat.format import load_chat_format


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """Each character is a token."""
    return train_sentencepiece(tmp_path_factory.mktemp("letters"), "char")


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("words"), "bpe")


@pytest.fixture(scope="session")
def llama3():
    return load_chat_format("llama3", DEFAULT)


@pytest.fixture(scope="session")
def chatml():
    return load_chat_format("chatml", CHATML)


@pytest.fixture(params=["llama2", "llama2 letters", "llama2 words", "llama3", "chatml"])
def each_format(request, letters, words, llama3, chatml):
    return {
        "llama2": lambda: load_chat_format("llama2", DEFAULT),
        "llama2 letters": lambda: load_chat_format("llama2", letters),
        "llama2 words": lambda: load_chat_format("llama2", words),
        "llama3": lambda: llama3,
        "chatml": lambda: chatml,
    }[request.param]()
