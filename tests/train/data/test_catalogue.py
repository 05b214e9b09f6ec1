"""Every data set is explained, and says how to get its files."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from spardl.errors import ConfigError, DataError
from spardl.train.data import DATASETS, load_data
from spardl.train.data.catalogue import CATALOGUE

FROM_FILES = [name for name, about in CATALOGUE.items() if about.needs]


def test_the_catalogue_explains_exactly_the_data_sets_that_there_are() -> None:
    """A data set is one line in each of the two tables."""
    assert list(CATALOGUE) == list(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_every_name_stands_for_a_function_with_whole_numbers_as_options(name: str) -> None:
    """What a recipe or the command line can say about a data set are numbers with defaults."""
    module, _, function = DATASETS[name].partition(":")
    directory, *options = inspect.signature(getattr(import_module(module), function)).parameters.values()
    assert directory.name == "directory" and directory.default is None
    assert all(type(option.default) is int for option in options)


@pytest.mark.parametrize("name", FROM_FILES)
def test_without_a_directory_the_option_that_names_it_is_told(name: str) -> None:
    """Files are never looked for in a place that nobody named."""
    with pytest.raises(ConfigError, match=f"data set {name} .*--data-dir"):
        load_data(name)


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_files_are_named_with_the_place_and_the_way_to_get_them(name: str, tmp_path: Path) -> None:
    """One sentence says what was looked for, where, and what to do."""
    with pytest.raises(DataError) as caught:
        load_data(name, tmp_path)
    sentence = str(caught.value)
    assert CATALOGUE[name].needs in sentence and str(tmp_path) in sentence
    if CATALOGUE[name].downloads:
        assert f"spardl data fetch {name} --data-dir {tmp_path}" in sentence
    else:
        assert "Nothing can be downloaded" in sentence


def test_a_directory_that_is_none_is_told(tmp_path: Path) -> None:
    """A mistyped path is not a data set without files."""
    with pytest.raises(DataError, match="no such folder"):
        load_data("cifar10", tmp_path / "nowhere")


@pytest.mark.parametrize("name", [name for name, about in CATALOGUE.items() if about.downloads])
def test_downloads_have_addresses_and_checksums_of_their_kind(name: str) -> None:
    """Only a file that its publisher replaces now and then goes without."""
    for download in CATALOGUE[name].downloads:
        assert download.url.startswith(("https://", "http://"))
        assert not Path(download.gives).is_absolute() and ".." not in Path(download.gives).parts
        if download.checksum is None:
            assert name == "ml-latest-small"
        else:
            method, _, digest = download.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[method]
            assert set(digest) <= set("0123456789abcdef")
