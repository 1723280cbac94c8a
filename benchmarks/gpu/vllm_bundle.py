"""``python -m bebop.bench.gpu.vllm_bundle FOLDER``: vLLM in one file, for a GPU machine without a network.

Such a machine has Python 3.12, torch 2.11 for CUDA 13, Triton and transformers, and accepts 64 MiB per call, the
working tree included. vLLM's wheel has 327 MB. ``FOLDER/vllm.tar.xz`` holds the parts that decoding needs:

- its Python files, and two extensions that are built on torch's stable ABI: vLLM pins torch 2.13, but these also load
  in 2.11. Machine code for other GPUs than ``--arch`` becomes zeros, which compress to nothing;
- the libraries that vLLM imports and the machine lacks, and modules with only names for those that are large and not
  used here (``STAND_INS``).

Left out are experts, MLA, quantised weights, FlashAttention 2, FlashInfer, structured output, the Rust front end and
its servers: models that need one of them fail when vLLM loads them. The file is the same to the byte each time.

On the machine: ``python3 -m tarfile -e vllm.tar.xz SITE``, then ``PYTHONPATH=SITE``. Nothing is installed.
"""

import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bebop.command import Parser, check_writable, run_main, writing
from bebop.errors import UserError

FILE = "vllm.tar.xz"
VLLM = "vllm==0.32.0"
LIBRARIES = (
    "annotated-types==0.8.0", "cachetools==8.0.1", "cbor2==6.2.1", "compressed-tensors==0.17.0", "distro==1.9.0",
    "fastapi==0.136.3", "loguru==0.7.3", "msgspec==0.22.0",
    "openai==2.54.0",  # 3 wants httpx2, which the machine lacks
    "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.3", "pydantic-core==2.50.4",
    "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0",
    "typing-extensions==4.16.0",  # the machine's is too old for pydantic
    "typing-inspection==0.4.5",
)  # fmt: skip
STAND_INS = ("llguidance", "lmformatenforcer", "openai_harmony", "outlines_core", "xgrammar")
PLATFORMS = tuple(f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 26, 17))  # pip matches each by name

# FlashAttention 3 is in: vLLM imports it unguarded where there is CUDA, and without it an MTP layer gets a backend that
# cannot run it. ``_C_stable_libtorch`` is imported unguarded too: there is no way around it.
OPERATORS = "vllm/_C_stable_libtorch.abi3.so"
FLASH_ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
KEPT = (".py", ".json", ".typed", ".jinja", ".dist-info/METADATA", ".dist-info/entry_points.txt")
LEFT_OUT = ("vllm/benchmarks/", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")
# One place assumes FlashInfer on CUDA: the file, a text in it, and the guard put before that text in the bundle.
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
IMPORT = "    from vllm.v1.attention.backends.flashinfer import FlashInferBackend\n\n    capability ="
GUARD = "    return False  # FlashInfer is not in this bundle\n\n"

STAND_IN = '''"""{name} is not in this bundle: what is imported from it is an empty class, which has any attribute."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__version__, __path__ = "0", []


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name

    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core.core_schema import any_schema

        return any_schema()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {{"__module__": __name__}})


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def exec_module(self, module):
        module.__getattr__ = __getattr__


sys.meta_path.append(_Submodules())
'''


def main(arguments: list[str]) -> None:
    """Write the file, and print its size."""
    parser = Parser(prog="python -m bebop.bench.gpu.vllm_bundle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help=f"where {FILE} goes")
    parser.add_argument("--arch", type=int, default=90, help="of the GPU, as in sm_90 (default: 90, Hopper)")
    parser.add_argument("--wheels", type=Path, help="a folder that keeps the downloads, 335 MB (default: they go)")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    check_writable("FOLDER", folder)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = options.wheels or Path(scratch, "wheels"), Path(scratch, "site")
        download(wheels)
        unpack(wheels, site, options.arch)
        pack(site, packed := Path(scratch, FILE))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(packed, folder / FILE)
    sys.stdout.write(f"{folder / FILE}: {(folder / FILE).stat().st_size / 1e6:.1f} MB\n")


def download(wheels: Path) -> None:
    """Download the missing wheels, for the machine's Python and not for this one."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    missing = [wanted for wanted in (VLLM, *LIBRARIES) if not _wheels(wheels, wanted)]
    if missing and subprocess.run([*command, *missing], check=False).returncode:
        raise UserError(f"pip could not download all of {', '.join(missing)}: see its lines above")


def _wheels(folder: Path, wanted: str) -> list[Path]:
    return sorted(folder.glob(f"{wanted.replace('-', '_').replace('==', '-')}-*.whl"))


def unpack(wheels: Path, site: Path, arch: int) -> None:
    """Write the parts of the wheels that the machine needs into ``site``."""
    for wanted in LIBRARIES:
        with zipfile.ZipFile(_wheels(wheels, wanted)[0]) as wheel:
            names = [n for n in wheel.namelist() if "/tests/" not in n and ".data/" not in n]
            wheel.extractall(site, [n for n in names if not n.endswith((".pyi", "/RECORD", ".c", ".h"))])
    with zipfile.ZipFile(_wheels(wheels, VLLM)[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(KEPT) and not n.startswith(LEFT_OUT)]
        wheel.extractall(site, [*names, FLASH_ATTENTION])
        (site / OPERATORS).write_bytes(slim(wheel.read(OPERATORS), arch))
    for name in STAND_INS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(STAND_IN.format(name=name))
    text = (site / SAMPLER).read_text()
    assert text.count(IMPORT) == 1, f"{SAMPLER} is not that of {VLLM}"
    (site / SAMPLER).write_text(text.replace(IMPORT, GUARD + IMPORT))


def pack(site: Path, file: Path) -> None:
    """Write an archive of ``site`` that depends only on names and contents."""
    # A dictionary of 192 MB spans everything: the libraries compress by what vLLM's own files have in common with them.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
    with lzma.open(file, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            info = tarfile.TarInfo(str(path.relative_to(site)))
            info.size, info.mode = path.stat().st_size, 0o644
            with path.open("rb") as content:
                archive.addfile(info, content)


# ---- machine code of one GPU
#
# The section .nv_fatbin of an extension holds fat binaries, one a source file. Each is a header and, for each GPU, an
# entry with a header of its own: machine code (ELF) or PTX. The CUDA tools that read them rely on these fields too.

FATBIN, SYMBOLS = ".nv_fatbin", (".symtab", ".strtab")  # symbols of debuggers alone
MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of this header, of what follows, ..., minor, major, arch
ELF = 2  # a kind
SHT_NOBITS = 8  # a section that takes no place in the file


class FatBinary(NamedTuple):
    """Place of a fat binary in a file, and its entries, each (kind, arch, bytes with its header)."""

    start: int  # of the entries
    header: int  # where its header begins
    size: int  # of all entries
    entries: list[tuple[int, int, bytes]]


def slim(binary: bytes, arch: int) -> bytes:
    """Return the extension with machine code for one GPU only, and without symbols for debuggers.

    Nothing moves: removed parts become zeros, so that no address in the file has to change. A fat binary without
    machine code for ``arch`` gets the smallest entry of another GPU. Its kernels were not usable before either, and
    compilers never write one without entries. Raises ``UserError`` if no code for ``arch`` is left.
    """
    data, places = bytearray(binary), sections(binary)
    for offset, size in (places[name] for name in SYMBOLS if name in places):
        data[offset : offset + size] = bytes(size)
    found = list(fat_binaries(binary, *places[FATBIN]))
    codes = [(number, code) for one in found for kind, number, code in one.entries if kind == ELF]
    others = sorted((code for number, code in codes if number != arch), key=len)
    if len(others) == len(codes):
        known = ", ".join(str(number) for number in sorted({number for number, _ in codes}))
        raise UserError(f"--arch {arch} is not possible: {VLLM} has machine code for {known}")
    for one in found:
        own = [code for kind, number, code in one.entries if kind == ELF and number == arch] or others[:1]
        body = b"".join(own)
        if len(body) <= one.size:  # another GPU's may be larger than all that is here: then this one stays
            data[one.start : one.start + one.size] = body.ljust(one.size, b"\0")
            HEADER.pack_into(data, one.header, MAGIC, 1, one.start - one.header, len(body))
    return bytes(data)


def sections(binary: bytes) -> dict[str, tuple[int, int]]:
    """Return offset and size, by name, of the sections of a 64-bit ELF file that have contents."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", binary, table + size * index) for index in range(count)]
    begins = [(rows[names][4] + row[0], row) for row in rows if row[1] != SHT_NOBITS]
    return {binary[at : binary.index(b"\0", at)].decode(): (row[4], row[5]) for at, row in begins}


def fat_binaries(binary: bytes, offset: int, size: int) -> Iterator[FatBinary]:
    """Yield the fat binaries of a section that begins at ``offset``."""
    at = offset
    while at + HEADER.size <= offset + size:
        magic, _, header, length = HEADER.unpack_from(binary, at)
        if magic != MAGIC:  # padding between two
            at += 8
            continue
        start = at + header
        yield FatBinary(start, at, length, list(_entries(binary[start : start + length])))
        at = start + length


def _entries(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(body):
        kind, _, header, payload, *_, arch = ENTRY.unpack_from(body, at)
        yield kind, arch, body[at : at + header + payload]
        at += header + payload


if __name__ == "__main__":
    run_main(main)
