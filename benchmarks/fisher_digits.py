"""The page of results of `tekfac fisher` on its own network, a small CNN trained on scikit-learn's digits.

python benchmarks/fisher_digits.py                                         the command, timed
python benchmarks/fisher_digits.py --report docs/results/fisher-digits.md  and the page, with its figures
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from provenance import provenance
from tekfac.cli.main import main as tekfac

FIGURES = {
    "errors": "Relative Frobenius error of every layer and method after the last epoch.",
    "angles": "Angle between (F̂ + λI)⁻¹g and (F + λI)⁻¹g, with λ = tr F / d, after the last epoch.",
    "spectra": "Eigenvalues of the exact block and every method's diagonal, in descending order; in brackets "
    "the number of parameters.",
    "heat-map": "The exact block of the first convolution, its four approximations, and their differences from "
    "it. Colours are logarithmic beyond a thousandth of the largest entry.",
    "training": "Relative Frobenius error along the training.",
}


def main() -> None:
    """Run the command and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    report: Path | None = parser.parse_args().report
    made_by = provenance([0])
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "report"
        start = time.perf_counter()
        if tekfac(["fisher", "--out", str(out), "--heat-map", "conv1", "--quiet"]):
            raise SystemExit("tekfac fisher failed")
        seconds = time.perf_counter() - start
        print(f"\n{seconds:.0f} s")
        if report is None:
            return
        folder = report.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:
            (folder / f"{name}.png").write_bytes((out / f"{name}.png").read_bytes())
        text = (out / "comparison.txt").read_text(encoding="utf-8")
    pictures = "\n\n".join(f"![{name}]({folder.name}/{name}.png)\n\n{text}" for name, text in FIGURES.items())
    report.write_text(
        "# The four approximations on a CNN\n\n"
        "What `tekfac fisher` gives for its own network: three convolutions with batch norm and two fully "
        "connected layers, trained by TEKFAC on digits, looked at along its training, on 512 images with the "
        f"exact Fisher in double precision. It took {seconds:.0f} s, training and figures included.\n\n"
        f"{pictures}\n\n"
        "Columns: the ratio of the traces; the relative Frobenius error; the cosine and the angle between "
        "(F̂ + λI)⁻¹g and (F + λI)⁻¹g with λ = tr F / d; how the exact block was looked at. Last, what is a "
        "theorem, an identity, or neither, over all layers and all points.\n\n"
        f"```\n{text}```\n\n{made_by}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
