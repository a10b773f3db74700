"""A data set by its name: found, read, checked, and all of it in memory."""

from __future__ import annotations

from pathlib import Path

from tekfac.lab.data.catalogue import DIGITS, FOLDER, named
from tekfac.lab.data.digits import digits
from tekfac.lab.data.folder import folder_of_images
from tekfac.lab.data.images import DataSet
from tekfac.lab.data.official import VARIABLE, default_folder, place_in, read_official


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    allow_partial: bool = False,
    image_size: int | None = None,
) -> DataSet:
    """Read a data set.

    Args:
        name: cifar10, cifar100, svhn, digits or folder.
        folder: that holds the files, or the official folder with the files; digits have none. Default:
            $TEKFAC_DATA, or ~/.cache/tekfac/data.
        allow_partial: go on with fewer images than the official ones; the notes of the set say so.
        image_size: of the set "folder": height and width to which its images are resized.

    Raises:
        ValueError: for an unknown name, for a folder where the set has none, and for data that are damaged or
            not complete.
        FileNotFoundError: if there is no such folder, or not the set's files in it.
    """
    known = named(name)
    if image_size is not None and known is not FOLDER:
        raise ValueError(
            f"--image-size is for the data set {FOLDER.name!r}. The images of {name} have one size."
        )
    if known is DIGITS:
        if folder is not None:
            raise ValueError(
                f"The data set {name!r} is in no folder: {DIGITS.about}. Leave --data-dir {str(folder)!r} out, "
                "or say with --data which set is there."
            )
        return digits()
    where = default_folder(name) if folder is None else Path(folder)
    if not where.is_dir():
        what = "is a file" if where.exists() else "does not exist"
        raise FileNotFoundError(f"The data folder {str(where)!r} {what}. {_advice(name)}")
    if known is FOLDER:
        return folder_of_images(where, image_size)
    place = place_in(known, where)
    if place is None:
        wanted = " or ".join(f"{layout.folder}/{layout.files[0].name}" for layout in known.layouts)
        raise FileNotFoundError(f"{str(where)!r} has no files of {name}, such as {wanted}. {_advice(name)}")
    return read_official(place, allow_partial=allow_partial)


def _advice(name: str) -> str:
    """What to do where the data are not."""
    if name == FOLDER.name:
        return f"Expected {FOLDER.about}."
    return f"Fetch them with `tekfac data fetch {name}`, or say which folder has them (${VARIABLE} by default)."
