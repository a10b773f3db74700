"""What is known of each data set: its classes, its statistics, its official files, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tekfac.common.checks import nearest

Kind = Literal["python", "binary", "mat"]
Role = Literal["train", "test", "classes", "other"]

TORONTO = "https://www.cs.toronto.edu/~kriz/"
STANFORD = "http://ufldl.stanford.edu/housenumbers/"


@dataclass(frozen=True)
class File:
    """An official file.

    Attributes:
        name: in the official folder, and on the server.
        role: images to train or test on, names of the classes, or nothing that is read.
        images: how many it holds officially.
        size: bytes; of text and of pickles about so many.
        md5: where one is known.
    """

    name: str
    role: Role
    images: int = 0
    size: int = 4096
    md5: str | None = None

    @property
    def largest(self) -> int:
        """A file of more bytes is not what its name says."""
        return 4 * self.size


@dataclass(frozen=True)
class Layout:
    """One of the ways in which a set is distributed: in an archive, or file by file where there is none."""

    kind: Kind
    folder: str
    files: tuple[File, ...]
    archive: File | None = None
    server: str = TORONTO

    def of(self, *roles: Role) -> tuple[File, ...]:
        """The files of some roles."""
        return tuple(file for file in self.files if file.role in roles)


@dataclass(frozen=True)
class Known:
    """A data set that has a name; `counts` are its images to train on and to test on.

    A set without classes and counts is the user's own, and one without layouts has no official files.
    """

    name: str
    about: str
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augmented: bool = False
    layouts: tuple[Layout, ...] = ()
    counts: tuple[int, int] = (0, 0)

    def layout(self, kind: str | None) -> Layout:
        """The layout of a kind; the preferred one, if none is asked for.

        Raises:
            ValueError: if the set has no such layout, or none at all.
        """
        if not self.layouts:
            raise ValueError(f"The data set {self.name!r} has no official files: {self.about}.")
        kinds = [layout.kind for layout in self.layouts]
        if kind is not None and kind not in kinds:
            raise ValueError(f"{self.name} has no layout {kind!r}. Expected {' or '.join(kinds)}.")
        return self.layouts[0] if kind is None else next(one for one in self.layouts if one.kind == kind)


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(CIFAR100_NAMES.split())
DIGIT_CLASSES = tuple("0123456789")

CIFAR10 = Known(
    "cifar10",
    "32x32 photographs of ten kinds of things",
    CIFAR10_CLASSES,
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    augmented=True,
    counts=(50_000, 10_000),
    layouts=(
        Layout(
            "python",
            "cifar-10-batches-py",
            (
                File("data_batch_1", "train", 10_000, 31_035_704, "c99cafc152244af753f735de768cd75f"),
                File("data_batch_2", "train", 10_000, 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
                File("data_batch_3", "train", 10_000, 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
                File("data_batch_4", "train", 10_000, 31_035_696, "634d18415352ddfa80567beed471001a"),
                File("data_batch_5", "train", 10_000, 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
                File("test_batch", "test", 10_000, 31_035_526, "40351d587109b95175f43aff81a1287e"),
                File("batches.meta", "classes", md5="5ff9c542aee3614f3951f8cda6e48888"),
            ),
            archive=File(
                "cifar-10-python.tar.gz", "other", size=170_498_071, md5="c58f30108f718f92721af3b95e74349a"
            ),
        ),
        Layout(
            "binary",
            "cifar-10-batches-bin",
            (
                *(File(f"data_batch_{number}.bin", "train", 10_000, 30_730_000) for number in range(1, 6)),
                File("test_batch.bin", "test", 10_000, 30_730_000),
                File("batches.meta.txt", "classes"),
            ),
            archive=File(
                "cifar-10-binary.tar.gz", "other", size=170_052_171, md5="c32a1d4ab5d03f1284b67883e8d87530"
            ),
        ),
    ),
)

CIFAR100 = Known(
    "cifar100",
    "32x32 photographs of a hundred kinds of things",
    CIFAR100_CLASSES,
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
    augmented=True,
    counts=(50_000, 10_000),
    layouts=(
        Layout(
            "python",
            "cifar-100-python",
            (
                File("train", "train", 50_000, 155_250_000, "16019d7e3df5f24257cddd939b257f8d"),
                File("test", "test", 10_000, 31_050_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
                File("meta", "classes", md5="7973b15100ade9c7d40fb424638fde48"),
            ),
            archive=File(
                "cifar-100-python.tar.gz", "other", size=169_001_437, md5="eb9058c3a382ffc7106e4002c42a8d85"
            ),
        ),
        Layout(
            "binary",
            "cifar-100-binary",
            (
                File("train.bin", "train", 50_000, 153_700_000),
                File("test.bin", "test", 10_000, 30_740_000),
                File("fine_label_names.txt", "classes"),
                File("coarse_label_names.txt", "other"),
            ),
            archive=File(
                "cifar-100-binary.tar.gz", "other", size=168_513_733, md5="03b5dce01913d631647c71ecec9e9cb8"
            ),
        ),
    ),
)

SVHN = Known(
    "svhn",
    "32x32 photographs of digits of house numbers",
    DIGIT_CLASSES,
    (0.4377, 0.4438, 0.4728),
    (0.1980, 0.2010, 0.1970),
    counts=(73_257, 26_032),
    layouts=(
        Layout(
            "mat",
            "svhn",
            (
                File("train_32x32.mat", "train", 73_257, 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
                File("test_32x32.mat", "test", 26_032, 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
            ),
            server=STANFORD,
        ),
    ),
)

DIGITS = Known(
    "digits", "8x8 handwritten digits that come with scikit-learn", DIGIT_CLASSES, counts=(1_437, 360)
)
FOLDER = Known("folder", "your own images, DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, or DIR/CLASS/*.png")

KNOWN = {known.name: known for known in (CIFAR10, CIFAR100, SVHN, DIGITS, FOLDER)}


def named(name: str) -> Known:
    """The data set of a name.

    Raises:
        ValueError: for an unknown one; the message suggests the nearest.
    """
    if name not in KNOWN:
        raise ValueError(f"There is no data set {name!r}.{nearest(name, KNOWN)}")
    return KNOWN[name]
