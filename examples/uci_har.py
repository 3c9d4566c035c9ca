"""Make uci_har.npz, which `eg.har` reads, from the official archive of UCI HAR.

Run it in the folder that holds `UCI HAR Dataset`.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIGNALS = [
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
]


def read(split: str) -> dict[str, NDArray[np.generic]]:
    """The windows of a split, [num_windows, 9, 128], with labels from 0 and people."""
    folder = f"UCI HAR Dataset/{split}"
    files = [f"{folder}/Inertial Signals/{signal}_{split}.txt" for signal in SIGNALS]
    return {
        f"x_{split}": np.stack([np.loadtxt(file, np.float32) for file in files], axis=1),
        f"y_{split}": np.loadtxt(f"{folder}/y_{split}.txt", int) - 1,
        f"subject_{split}": np.loadtxt(f"{folder}/subject_{split}.txt", int),
    }


if __name__ == "__main__":
    if not Path("UCI HAR Dataset").is_dir():
        sys.exit("there is no folder 'UCI HAR Dataset' here; unpack the archive first")
    np.savez("uci_har.npz", allow_pickle=False, **read("train"), **read("test"))
