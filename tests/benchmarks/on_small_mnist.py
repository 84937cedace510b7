"""Run a script of the tutorial on the first images of MNIST: ``python on_small_mnist.py SCRIPT
ARGUMENTS``.

The library checks MNIST's checksums, so those of the shortened files are declared here.
``torchvision.load`` makes ``import torchvision`` work beside a build of torch that is not the one
of its wheel."""

import hashlib
import runpy
import sys
from pathlib import Path

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition import published

if __name__ == "__main__":
    torchvision.load("datasets")
    sys.argv = sys.argv[1:]
    folder = Path(sys.argv[sys.argv.index("--data") + 1])
    for file in folder.glob("MNIST/raw/*"):
        published.MNIST_MD5[file.name] = hashlib.md5(file.read_bytes()).hexdigest()
    runpy.run_path(sys.argv[0], run_name="__main__")
