"""Text to predict: word by word or character by character, as a stream, in windows, or under a mask.

`ptb` and `wikitext-2` are streams of words for recurrent models. `pydoc` and `text` are windows of characters for
transformers, `tinyshakespeare` too, cut anew in every epoch. Sets named `-masked` are windows of which some tokens are
hidden, as BERT learns them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.errors import DataError
from spardl.train.data.files import check_window, missing, places, read_text
from spardl.train.dataset import DataSet
from spardl.train.source import IGNORED, Batch, Examples, Stream, Windows
from spardl.train.tasks import LanguageModel

END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"

TEST_SHARE = 10  # of a text without a test part of its own, one in so many characters: the last

# Of BERT: of the tokens of a window so many are to be guessed; of those, most are hidden and some replaced.
MASKED_SHARE = 0.15
HIDDEN, REPLACED = 0.8, 0.1
TEST_MASK_SEED = 20240513


class Tokens(NamedTuple):
    """Both parts of a text as numbers below `vocabulary`."""

    train: Tensor
    test: Tensor
    vocabulary: int
    note: str = ""


def ptb(directory: Path | None = None, window: int = 35) -> DataSet:
    """Penn Treebank, as Mikolov prepared it. Marcus et al., 1993; Mikolov et al., 2010."""
    return _stream("ptb", _words("ptb", directory, "ptb.{}.txt", official=929_589), window)


def wikitext2(directory: Path | None = None, window: int = 35) -> DataSet:
    """WikiText-2. Merity et al., "Pointer sentinel mixture models", 2016."""
    return _stream("wikitext-2", _wikitext2("wikitext-2", directory), window)


def wikitext2_masked(directory: Path | None = None, window: int = 128) -> DataSet:
    """The words of WikiText-2, some of them masked, for models that fill them in."""
    return _masked("wikitext-2-masked", _wikitext2("wikitext-2-masked", directory), window)


def pydoc(directory: Path | None = None, window: int = 128) -> DataSet:
    """The characters of Python's manual, which needs no files: its last tenth is the test."""
    return _windows("pydoc", _pydoc(), window)


def pydoc_stream(directory: Path | None = None, window: int = 35) -> DataSet:
    """The characters of Python's manual, in order, for recurrent models."""
    return _stream("pydoc-stream", _pydoc(), window)


def pydoc_masked(directory: Path | None = None, window: int = 128) -> DataSet:
    """The characters of Python's manual, some of them masked, for models that fill them in."""
    return _masked("pydoc-masked", _pydoc(), window)


def text(directory: Path | None = None, window: int = 128) -> DataSet:
    """The characters of all .txt files of a folder, in the order of their names: the last tenth is the test."""
    return _windows("text", _text("text", directory), window)


def text_masked(directory: Path | None = None, window: int = 128) -> DataSet:
    """The characters of all .txt files of a folder, some of them masked, for models that fill them in."""
    return _masked("text-masked", _text("text-masked", directory), window)


def tinyshakespeare(directory: Path | None = None, window: int = 64) -> DataSet:
    """The characters of some of Shakespeare's plays, 1.1 million. The last tenth is the test, judged by its loss.

    Karpathy, "The unreasonable effectiveness of recurrent neural networks", 2015.
    """
    name, official = "tinyshakespeare", 1_115_394
    content = read_text(_file(name, directory, "tinyshakespeare.txt"))
    tokens = _characters(content)
    _check(name, tokens, window)
    return DataSet(
        name=name,
        train=Windows(tokens.train, window),
        test=Windows(tokens.test, window),
        task=LanguageModel(metric="loss"),
        facts={"vocabulary": tokens.vocabulary},
        note=f"a subset: {len(content):,} of {official:,} characters" if len(content) < official else "",
    )


def _stream(name: str, tokens: Tokens, window: int) -> DataSet:
    _check(name, tokens, window)
    return DataSet(
        name=name,
        train=Stream(tokens.train, window),
        test=Stream(tokens.test, window),
        task=LanguageModel(recurrent=True),
        facts={"vocabulary": tokens.vocabulary},
        note=tokens.note,
    )


def _windows(name: str, tokens: Tokens, window: int) -> DataSet:
    _check(name, tokens, window)
    return DataSet(
        name=name,
        train=next_tokens(tokens.train, window),
        test=next_tokens(tokens.test, window),
        task=LanguageModel(),
        facts={"vocabulary": tokens.vocabulary},
        note=tokens.note,
    )


def _masked(name: str, tokens: Tokens, window: int) -> DataSet:
    """The mask is one more token, the last. The test is masked once and for all, alike for any number of workers."""
    _check(name, tokens, window)
    train, test = (part[: len(part) // window * window].view(-1, window) for part in (tokens.train, tokens.test))
    mask = partial(mask_some, vocabulary=tokens.vocabulary)
    return DataSet(
        name=name,
        train=Examples(train, augment=mask),
        test=Examples(*mask((test,), torch.Generator().manual_seed(TEST_MASK_SEED))),
        task=LanguageModel(),
        facts={"vocabulary": tokens.vocabulary + 1},
        note=tokens.note,
    )


def next_tokens(tokens: Tensor, window: int) -> Examples:
    """Independent windows, side by side: a batch is (inputs, targets), and targets are the tokens that follow.

    Each token but the first is a target once; beyond the end of the last window, targets are ignored.
    """
    starts = torch.arange(0, len(tokens) - 1, window)
    return Examples(starts, prepare=partial(_read_windows, stream=Stream(tokens, window)))


def _read_windows(batch: Batch, *, stream: Stream) -> Batch:
    (starts,) = batch
    return stream.fetch(starts, torch.Generator())


def mask_some(batch: Batch, generator: torch.Generator, *, vocabulary: int) -> Batch:
    """Hide 15 % of the tokens of each window, one at least: (tokens, targets), where only hidden ones are targets.

    Of those, 80 % become the mask, which is `vocabulary`, 10 % a random token, and 10 % stay what they are: Devlin et
    al., "BERT: Pre-training of deep bidirectional transformers", 2019.
    """
    (tokens,) = batch
    count = max(1, round(MASKED_SHARE * tokens.shape[1]))
    chosen = torch.rand(tokens.shape, generator=generator).argsort(dim=1)[:, :count]
    wanted = tokens.gather(1, chosen)
    fate = torch.rand(wanted.shape, generator=generator)
    random = torch.randint(vocabulary, wanted.shape, generator=generator)
    shown = torch.where(fate < HIDDEN, vocabulary, torch.where(fate < HIDDEN + REPLACED, random, wanted))
    targets = torch.full_like(tokens, IGNORED).scatter(1, chosen, wanted)
    return tokens.scatter(1, chosen, shown), targets


def _wikitext2(name: str, directory: Path | None) -> Tokens:
    return _words(name, directory, "wiki.{}.tokens", official=2_088_628)


def _words(name: str, directory: Path | None, pattern: str, *, official: int) -> Tokens:
    """Words of the training and test files; the vocabulary is that of training, the most frequent words first."""
    train_file, test_file = _find(name, directory, pattern)
    train, test = read_words(train_file), read_words(test_file)
    if not train or not test:
        raise DataError(f"{train_file if not train else test_file} is empty.")
    counts = Counter(train)
    numbers = {word: number for number, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    strange = next((word for word in test if word not in numbers), None)
    if strange is not None and UNKNOWN not in numbers:
        raise DataError(
            f"{test_file} holds {strange!r}, which {train_file} does not, nor the word {UNKNOWN} to stand for it;"
            " they do not belong together."
        )
    note = f"a subset: {len(train):,} of {official:,} training words" if len(train) < official else ""
    return Tokens(_numbered(train, numbers), _numbered(test, numbers), len(numbers), note)


def read_words(path: Path) -> list[str]:
    """Words between spaces, with a token of its own for the end of each line."""
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [word for line in lines for word in (*line.split(), END_OF_LINE)]


def _file(name: str, directory: Path | None, file: str) -> Path:
    for folder in places(name, directory):
        if (folder / file).is_file():
            return folder / file
    raise missing(name, directory)


def _find(name: str, directory: Path | None, pattern: str) -> tuple[Path, Path]:
    for folder in places(name, directory, "simple-examples/data"):
        train, test = (folder / pattern.format(split) for split in ("train", "test"))
        if train.is_file() and test.is_file():
            return train, test
    raise missing(name, directory)


def _numbered(words: Sequence[str], numbers: dict[str, int]) -> Tensor:
    unknown = numbers.get(UNKNOWN, -1)
    return torch.tensor([numbers.get(word, unknown) for word in words])


def _pydoc() -> Tokens:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python came without pydoc_data; install its standard library in full.") from error
    return _characters("\n\n".join(topics[name] for name in sorted(topics)))


def _text(name: str, directory: Path | None) -> Tokens:
    for folder in places(name, directory):
        files = sorted(path for path in folder.glob("*.txt") if path.is_file())
        if files:
            return _characters("\n".join(read_text(path) for path in files))
    raise missing(name, directory)


def _characters(content: str) -> Tokens:
    alphabet = {character: number for number, character in enumerate(sorted(set(content)))}
    tokens = torch.tensor([alphabet[character] for character in content], dtype=torch.int64)
    cut = len(tokens) - len(tokens) // TEST_SHARE
    return Tokens(tokens[:cut], tokens[cut:], len(alphabet))


def _check(name: str, tokens: Tokens, window: int) -> None:
    parts: Iterable[tuple[str, Tensor]] = (("training", tokens.train), ("test", tokens.test))
    for part, content in parts:
        check_window(window, len(content), f"the {part} part of {name}")
