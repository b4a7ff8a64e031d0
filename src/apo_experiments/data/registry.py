"""The official files of each data set: paths, sizes, checksums and sources.

Paths are relative to the data directory. A checksum may be of the *content* of a gzip file, because the same
idx file circulates in several compressions. If no checksum of a file has been published there is none here,
and only the structure of the file is verified.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from apo_experiments.errors import UserError


@dataclass(frozen=True)
class Checksum:
    """A digest that a file must have, or if ``of_content`` what a gzip file unpacks to; algorithms of hashlib."""

    digest: str
    algorithm: str = "sha256"
    of_content: bool = False


@dataclass(frozen=True)
class DataFile:
    """One official file: its path in the data directory, its bytes unless they vary, its checksum if there is one."""

    path: str
    size: int | None = None
    checksum: Checksum | None = None


@dataclass(frozen=True)
class Source:
    """One download.

    Attributes:
        urls: Addresses of the same content, tried in this order.
        paths: The paths that members of the archive, or the download itself, get; the last part is the member's name.
        unpack: ``"none"``, ``"gzip"``, ``"tar"`` or ``"zip"``.
        checksum: Of the download itself, or None.
    """

    urls: tuple[str, ...]
    paths: tuple[str, ...]
    unpack: str = "none"
    checksum: Checksum | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set: its official files and how to get them.

    Attributes:
        name: What the command line calls it.
        title: One line on what it is.
        kind: Which loader reads it: ``"images"``, ``"tables"`` or ``"text"``.
        files: The files that the loader reads.
        sources: Where ``apo data fetch`` gets them; empty if they have to be downloaded by hand.
        licence: As its authors state it.
        by_hand: Half a sentence on how to get it without ``apo data fetch``.
    """

    name: str
    title: str
    kind: str
    files: tuple[DataFile, ...]
    sources: tuple[Source, ...]
    licence: str
    by_hand: str


def _idx(
    name: str, title: str, licence: str, mirrors: tuple[str, ...], digests: tuple[tuple[str, str], ...]
) -> Dataset:
    """Describe a set of four idx files, each with the digest of its content."""
    return Dataset(
        name,
        title,
        "images",
        tuple(DataFile(f"{name}/{file}.gz", None, Checksum(digest, of_content=True)) for file, digest in digests),
        tuple(
            Source(tuple(f"{mirror}/{file}.gz" for mirror in mirrors), (f"{name}/{file}.gz",)) for file, _ in digests
        ),
        licence,
        f"put the four *-ubyte.gz files into the folder {name}",
    )


MNIST = _idx(
    "mnist",
    "MNIST: 60,000 + 10,000 handwritten digits, 28 x 28",
    "CC BY-SA 3.0 as commonly given",
    (
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "http://yann.lecun.com/exdb/mnist",
    ),
    (
        ("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
)

FASHION_MNIST = _idx(
    "fashion-mnist",
    "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28 x 28",
    "MIT",
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    (
        ("train-images-idx3-ubyte", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        ("train-labels-idx1-ubyte", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        ("t10k-images-idx3-ubyte", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        ("t10k-labels-idx1-ubyte", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
)

_CIFAR10_DIGESTS = (
    ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)


def _cifar(classes: int, files: tuple[DataFile, ...], digest: str) -> Dataset:
    """Describe the binary version of CIFAR, whose archive has an MD5 digest."""
    archive = f"cifar-{classes}-binary.tar.gz"
    url, paths = f"https://www.cs.toronto.edu/~kriz/{archive}", tuple(file.path for file in files)
    return Dataset(
        f"cifar{classes}",
        f"CIFAR-{classes}: 50,000 + 10,000 colour images of {classes} classes, 32 x 32",
        "images",
        files,
        (Source((url,), paths, "tar", Checksum(digest, "md5")),),
        "none stated; cite Krizhevsky 2009",
        f"unpack the binary version, {archive}",
    )


CIFAR10 = _cifar(
    10,
    tuple(DataFile(f"cifar-10-batches-bin/{file}", 30_730_000, Checksum(digest)) for file, digest in _CIFAR10_DIGESTS),
    "c32a1d4ab5d03f1284b67883e8d87530",
)

# A record is a coarse label, a fine label and 3,072 pixels. Only the archive has a published checksum.
CIFAR100 = _cifar(
    100,
    (DataFile("cifar-100-binary/train.bin", 153_700_000), DataFile("cifar-100-binary/test.bin", 30_740_000)),
    "03b5dce01913d631647c71ecec9e9cb8",
)

SVHN = Dataset(
    "svhn",
    "SVHN: 73,257 + 26,032 house numbers, cropped digits, 32 x 32",
    "images",
    (
        DataFile("svhn/train_32x32.mat", 182_040_794, Checksum("e26dedcc434d2e4c54c9b2d4a06d8373", "md5")),
        DataFile("svhn/test_32x32.mat", 64_275_384, Checksum("eb5a983be6a315427106f1b164d9cef3", "md5")),
    ),
    tuple(
        Source((f"http://ufldl.stanford.edu/housenumbers/{file}",), (f"svhn/{file}",))
        for file in ("train_32x32.mat", "test_32x32.mat")
    ),
    "for non-commercial use",
    "put train_32x32.mat and test_32x32.mat into the folder svhn",
)


def _uci(name: str, title: str, file: DataFile, page: str) -> Dataset:
    """Describe one table of the UCI collection."""
    return Dataset(
        name,
        title,
        "tables",
        (file,),
        (Source((f"https://archive.ics.uci.edu/static/public/{page}.zip",), (file.path,), "zip"),),
        "CC BY 4.0",
        f"put {file.path.removeprefix('uci/')} into the folder uci",
    )


_PROTEIN = Checksum("4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40")
_PARKINSONS = Checksum("f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39")
_UCI = (
    _uci(
        "slice",
        "UCI Slice: 53,500 CT slices, 384 features, relative location",
        DataFile("uci/slice_localization_data.csv"),
        "206/relative+location+of+ct+slices+on+axial+axis",
    ),
    _uci(
        "protein",
        "UCI Protein: 45,730 decoys, 9 features, RMSD",
        DataFile("uci/CASP.csv", 3_528_710, _PROTEIN),
        "265/physicochemical+properties+of+protein+tertiary+structure",
    ),
    _uci(
        "parkinsons",
        "UCI Parkinsons: 5,875 recordings, 19 features, two UPDRS scores",
        DataFile("uci/parkinsons_updrs.data", 911_261, _PARKINSONS),
        "189/parkinsons+telemonitoring",
    ),
)

_MULTI30K = (
    ("train.de", 2_110_398, "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
    ("train.en", 1_801_238, "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
    ("val.de", 75_981, "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"),
    ("val.en", 63_297, "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"),
    ("test_2016_flickr.de", 70_649, "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"),
    ("test_2016_flickr.en", 62_076, "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"),
)

MULTI30K = Dataset(
    "multi30k",
    "Multi30k: 29,000 + 1,014 + 1,000 captions, German and English",
    "text",
    tuple(DataFile(f"de-en/multi30k/{file}", size, Checksum(digest)) for file, size, digest in _MULTI30K),
    tuple(
        Source(
            (f"https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{file}.gz",),
            (f"de-en/multi30k/{file}",),
            "gzip",
        )
        for file, _, _ in _MULTI30K
    ),
    "for research",
    "put the unpacked raw files of task 1 into the folder de-en/multi30k",
)

TATOEBA = Dataset(
    "tatoeba",
    "Tatoeba: some 200,000 pairs of short sentences, German and English",
    "text",
    # It grows every month, so there is no fixed checksum.
    (DataFile("de-en/deu.txt"),),
    (Source(("https://www.manythings.org/anki/deu-eng.zip",), ("de-en/deu.txt",), "zip"),),
    "CC BY 2.0 (manythings.org, tatoeba.org)",
    "put deu.txt of manythings.org's deu-eng.zip into the folder de-en",
)

IWSLT14 = Dataset(
    "iwslt14",
    "IWSLT'14: some 160,000 + 7,283 + 6,750 sentences of TED talks, German and English",
    "text",
    tuple(
        DataFile(f"de-en/iwslt14/{split}.{language}")
        for split in ("train", "valid", "test")
        for language in ("de", "en")
    ),
    (),
    "CC BY-NC-ND 3.0 (TED)",
    "take the German-English text of the 2014 release from wit3.fbk.eu, strip the markup, split it, and put it as "
    "plain text, one sentence a line, into de-en/iwslt14/{train,valid,test}.{de,en}",
)

#: All data sets by name.
DATASETS: dict[str, Dataset] = {
    entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SVHN, *_UCI, MULTI30K, TATOEBA, IWSLT14)
}


def dataset(name: str) -> Dataset:
    """Return the data set of that name."""
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name, DATASETS, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(DATASETS)}."
    raise UserError(f"There is no data set {name!r}; {hint}")
