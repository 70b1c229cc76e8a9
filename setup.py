"""Distribution tb-chopper: the TensorBoard plugin (tb_chopper) and what runs inside the training (torch_ext)."""

from pathlib import Path

from setuptools import find_packages, setup

TORCH_PROFILER = ["torch-tb-profiler>=0.4.3"]
TRACE = ["viztracer>=1.1", "perfetto>=0.59"]
AMD = ["amdsmi>=6.2"]
NVIDIA = ["nvidia-ml-py>=12.535"]
REMOTE = ["fsspec>=2023.1"]
# torch is asked for by the demo and the tests alone: the plain install never touches the user's torch.
DEMO = ["torch>=2.4", "psutil>=5.9"]
TEST = [
    *DEMO, *TORCH_PROFILER, *REMOTE, *TRACE,
    "pytest>=8", "pytest-xdist>=3", "hypothesis>=6.100", "playwright>=1.50", "ruff>=0.9", "mypy>=1.14",
    "import-linter>=2.1",
]

setup(
    name="tb-chopper",
    version="0.1.0",
    description="Where the GPU time of a training goes and why the hardware runs below its peak, inside TensorBoard",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["tb_chopper", "tb_chopper.*", "torch_ext", "torch_ext.*"]),
    package_data={
        "tb_chopper": ["py.typed", "frontend/*", "frontend/**/*", "backend/export/*.js", "backend/export/*.css"],
        "torch_ext": ["py.typed"],
    },
    install_requires=[
        "tensorboard>=2.21", "pandas>=2.0", "numpy>=1.24", "pyarrow>=14", "plotly>=6.0", "msgspec>=0.18", "protobuf>=4",
    ],
    extras_require={
        "demo": DEMO, "test": TEST, "trace": TRACE, "torch-profiler": TORCH_PROFILER,
        "amd": AMD, "nvidia": NVIDIA, "remote": REMOTE,
    },
    entry_points={
        "tensorboard_plugins": ["chopper = tb_chopper.plugin:ChopperPlugin"],
        "console_scripts": ["tb-chopper = tb_chopper.cli:main"],
    },
    classifiers=["Programming Language :: Python :: 3", "Topic :: Software Development :: Debuggers"],
)
