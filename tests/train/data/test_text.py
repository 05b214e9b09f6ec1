"""Text as a stream, in windows, and under a mask."""

import math
from pathlib import Path

import pytest
import torch

from spardl.errors import ConfigError, DataError
from spardl.train.data import load_data
from spardl.train.data.text import mask_some, next_tokens, ptb, pydoc, read_words, text, wikitext2
from spardl.train.source import IGNORED, Stream, batches

TRAIN = " \n = One = \n \n the cat sat on the <unk> \n"
TEST = " the dog sat \n"
WORDS = ["<eos>", "=", "One", "=", "<eos>", "<eos>", "the", "cat", "sat", "on", "the", "<unk>", "<eos>"]


def write_words(folder: Path, train: str = TRAIN, test: str = TEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("wiki.{}.tokens", "ptb.{}.txt"):
        (folder / pattern.format("train")).write_text(train, encoding="utf-8")
        (folder / pattern.format("test")).write_text(test, encoding="utf-8")
    return folder


def write_text(folder: Path, content: str = "to be, or not to be\n" * 50) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(content, encoding="utf-8")
    return folder


def test_words_end_with_a_token_for_each_line(tmp_path: Path) -> None:
    """Empty lines count too, as in the published counts."""
    write_words(tmp_path)
    assert read_words(tmp_path / "wiki.train.tokens") == WORDS


@pytest.mark.parametrize("name", ["wikitext-2", "ptb"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_words_are_numbered_by_how_often_training_uses_them(tmp_path: Path, name: str, line_end: str) -> None:
    """Ties go by the alphabet; a test word that training does not have is <unk>."""
    write_words(tmp_path / name, TRAIN.replace("\n", line_end), TEST.replace("\n", line_end))
    data = load_data(name, tmp_path, window=2)
    vocabulary = ["<eos>", "=", "the", "<unk>", "One", "cat", "on", "sat"]
    assert data.train.tokens.tolist() == [vocabulary.index(word) for word in WORDS]
    assert data.test.tokens.tolist() == [vocabulary.index(word) for word in ("the", "<unk>", "sat", "<eos>")]
    assert data.facts == {"vocabulary": 8}
    assert data.note.startswith("a subset: 13 of ")


def test_streams_of_words_are_for_recurrent_models(tmp_path: Path) -> None:
    """Windows of 35 unless another length is asked for."""
    write_words(tmp_path, TRAIN * 10, TEST * 20)
    for load in (ptb, wikitext2):
        data = load(tmp_path)
        assert isinstance(data.train, Stream) and data.train.window == 35
        assert data.task.recurrent
        assert load(tmp_path, window=30).test.window == 30


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A test word that training does not have needs an <unk> to stand for it."""
    write_words(tmp_path, "a b c\n", "a d\n")
    with pytest.raises(DataError, match=r"'d', which .* does not"):
        wikitext2(tmp_path, window=2)


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"caf\xe9 noir\n", "not UTF-8 text: byte 3 is 0xe9"), (b"", "is empty")]
)
def test_damaged_text_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    """With the place of the first byte that is wrong."""
    write_words(tmp_path)
    (tmp_path / "wiki.train.tokens").write_bytes(content)
    with pytest.raises(DataError, match=rf"wiki\.train\.tokens.* {sentence}"):
        wikitext2(tmp_path, window=2)


@pytest.mark.parametrize(("window", "sentence"), [(0, "1 or more"), (100, "do not fit the test part of text")])
def test_windows_that_do_not_fit_are_refused(tmp_path: Path, window: int, sentence: str) -> None:
    """The test part of a short text is shorter still."""
    with pytest.raises(ConfigError, match=sentence):
        text(write_text(tmp_path), window=window)


def test_python_brings_a_text_along() -> None:
    """Nearly half a million characters, of which the last tenth is the test."""
    data = pydoc()
    assert 300_000 < 128 * len(data.train) < 1_000_000
    assert abs(len(data.train) / len(data.test) - 9) < 0.1
    assert 50 < data.facts["vocabulary"] < 300
    assert not data.task.recurrent
    inputs, targets = next(iter(batches(data.train, [torch.arange(3)], seeds=(0,))))
    assert inputs.shape == targets.shape == (3, 128)
    assert inputs.dtype == targets.dtype == torch.int64
    stream = load_data("pydoc-stream")
    assert stream.task.recurrent and stream.facts == data.facts


def test_all_text_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Characters are numbered in their own order."""
    for name, content in (("b.txt", "cb\r\n" * 10), ("a.txt", "ab" * 20), ("c.md", "zzz")):
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    data = text(tmp_path, window=4)
    assert data.facts == {"vocabulary": 4}
    inputs, _ = data.train.fetch(torch.arange(2), torch.Generator())
    assert inputs.tolist() == [[1, 2, 1, 2]] * 2
    (tmp_path / "a.txt").write_text("\u00e9" * 100, encoding="utf-8")
    assert text(tmp_path, window=4).facts == {"vocabulary": 4}, "characters, not bytes"


@pytest.mark.parametrize("window", [1, 3, 7, 10])
@pytest.mark.parametrize("workers", [1, 3])
def test_windows_hold_each_token_once_as_a_target(window: int, workers: int) -> None:
    """All but the first, also where the last window is not full; a target is what follows its input."""
    source = next_tokens(torch.arange(50), window)
    counted: list[int] = []
    for rank in range(workers):
        for inputs, targets in batches(source, source.sweep(rank, workers, 2), seeds=(0,)):
            known = targets != IGNORED
            assert torch.equal(inputs[known] + 1, targets[known])
            counted += targets[known].tolist()
    assert sorted(counted) == list(range(1, 50))


def test_windows_are_shuffled() -> None:
    """They are independent, unlike those of a stream."""
    source = next_tokens(torch.arange(1000), 10)
    orders = [source.order(2, 5, seed=0, epoch=epoch) for epoch in (0, 1)]
    assert not torch.equal(*orders)
    assert sorted(orders[0].flatten().tolist()) == list(range(100))


def test_a_mask_hides_a_share_of_each_window_in_three_ways() -> None:
    """15 % are to be guessed: of these, 80 % show the mask, 10 % some token, 10 % themselves; others stay."""
    vocabulary = 1000
    tokens = torch.randint(vocabulary, (500, 100), generator=torch.Generator().manual_seed(0))
    shown, targets = mask_some((tokens,), torch.Generator().manual_seed(1), vocabulary=vocabulary)
    chosen = targets != IGNORED
    assert chosen.sum(dim=1).tolist() == [15] * 500
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(shown[~chosen], tokens[~chosen])
    hidden = shown[chosen] == vocabulary
    kept = shown[chosen] == tokens[chosen]
    total = int(chosen.sum())
    for share, expected in ((hidden, 0.8), (kept, 0.1), (~hidden & ~kept, 0.1)):
        assert abs(int(share.sum()) / total - expected) < 4 * math.sqrt(0.16 / total)
    assert int(shown.max()) == vocabulary
    places = chosen.double().mean(dim=0)
    assert float(places.min()) > 0.05 and float(places.max()) < 0.3


@pytest.mark.parametrize("window", [1, 2, 5])
def test_even_a_short_window_has_something_to_guess(window: int) -> None:
    """Otherwise a loss would be the mean of nothing."""
    _, targets = mask_some((torch.zeros(20, window, dtype=torch.int64),), torch.Generator(), vocabulary=3)
    assert ((targets != IGNORED).sum(dim=1) == 1).all()


@pytest.mark.parametrize("name", ["text-masked", "wikitext-2-masked", "pydoc-masked"])
def test_masks_are_drawn_anew_in_training_and_stay_in_the_test(tmp_path: Path, name: str) -> None:
    """The vocabulary has one more token, and what is measured does not depend on seeds or workers."""
    write_text(tmp_path / "text")
    write_words(tmp_path / "wikitext-2", TRAIN * 30, TEST * 30)
    data = load_data(name, tmp_path, window=16)
    plain = load_data(name.replace("wikitext-2-masked", "wikitext-2").replace("-masked", ""), tmp_path, window=16)
    assert data.facts["vocabulary"] == plain.facts["vocabulary"] + 1
    first, second = (data.train.fetch(torch.arange(4), torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    first, second = (data.test.fetch(torch.arange(2), torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    assert torch.equal(first, second)
    assert not data.task.recurrent


VERSES = "".join(f"{number} times to be, or not to be\n" for number in range(100))


@pytest.mark.parametrize("folder", ["", "tinyshakespeare"])
def test_shakespeare_is_one_file_judged_by_the_loss_of_its_last_tenth(tmp_path: Path, folder: str) -> None:
    """In the directory itself or in a folder of its name; what is shorter than the real one says so."""
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "tinyshakespeare.txt").write_text(VERSES, encoding="utf-8")
    (tmp_path / folder / "a.txt").write_text("other text", encoding="utf-8")
    data = load_data("tinyshakespeare", tmp_path, window=16)
    alphabet = sorted(set(VERSES))
    assert data.facts == {"vocabulary": len(alphabet)}
    tokens = torch.cat([data.train.tokens, data.test.tokens])
    assert "".join(alphabet[token] for token in tokens) == VERSES
    assert len(data.test.tokens) == len(VERSES) // 10
    assert (data.task.metric, data.task.better, data.task.recurrent) == ("loss", "lower", False)
    assert data.note == f"a subset: {len(VERSES):,} of 1,115,394 characters"


@pytest.mark.parametrize("real", ["wikitext-2"], indirect=True)
def test_the_real_wikitext2_has_the_published_counts(real: Path) -> None:
    """Words with line ends, and different ones in training."""
    data = wikitext2(real)
    counts = [len(read_words(real / "wikitext-2" / f"wiki.{part}.tokens")) for part in ("train", "valid", "test")]
    assert counts == [2_088_628, 217_646, 245_569]
    assert [len(data.train) + 1, len(data.test) + 1] == [2_088_628, 245_569]
    assert data.facts == {"vocabulary": 33_278}
    assert data.note == ""


@pytest.mark.parametrize("real", ["embed/tinyshakespeare.txt"], indirect=True)
def test_tiny_shakespeare_has_sixty_five_characters(real: Path) -> None:
    """1,115,394 of them in all."""
    data = text(real / "embed")
    assert data.facts == {"vocabulary": 65}
    assert len(data.train) == math.ceil((1_115_394 - 111_539 - 1) / 128)
    other = load_data("tinyshakespeare", real / "embed")
    assert (other.facts, other.note) == ({"vocabulary": 65}, "")
    assert (len(other.train) + 1, len(other.test) + 1) == (1_115_394 - 111_539, 111_539)
