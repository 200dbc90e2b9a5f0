"""A mesh file and the files it refers to: found, read once, and textures decoded within limits."""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path, PureWindowsPath

import numpy as np
from PIL import Image

from shoal.core.errors import ShoalError, excerpt, missing

MAX_FILE_BYTES = 8 * 2**30
"""Bytes. Fifty million triangles fit; a larger file is most likely not a mesh."""
MAX_IMAGE_PIXELS = 2**27
"""Pixels of one texture: 16,384 x 8,192. Checked before decoding, because a small file can declare any size."""
MAX_TOTAL_PIXELS = 2**30
"""Pixels of all textures of a scene: 4 GiB decoded."""
MAX_REFERENCE_CHARS = 4096
"""Characters of a reference to another file, as the longest path on Linux."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TGA", "GIF")


class Source:
    """A mesh file and its references. Each file is read once, so the hash and the scene use the same bytes."""

    def __init__(self, path: str | Path):
        self._contents: dict[Hashable, bytes] = {}
        self._digests: dict[Hashable, bytes] = {}
        self._names: dict[Path, dict[str, str]] = {}
        try:
            self.path = Path(path).expanduser()
            is_folder, exists, is_file = self.path.is_dir(), self.path.exists(), self.path.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # a folder without permission, an invalid file name
            raise ShoalError(f"{str(path)[:200]!r} cannot be read: {error}.") from None
        self.name = self.path.name
        if is_folder:
            raise ShoalError(f"{self.path} is a folder; name the mesh file inside it.")
        if not exists:
            raise ShoalError(missing("file", self.path))
        if not is_file:
            raise ShoalError(f"{self.path} is not a regular file.")

    @property
    def data(self) -> bytes:
        """The bytes of the mesh file."""
        data = self.content(self.path)
        if not data:
            raise ShoalError(f"{self.name} is empty (0 bytes).")
        return data

    def find(self, reference: str, beside: Path | None = None) -> Path | None:
        """The path of a referenced file, or None if it does not exist.

        References are relative to the file that contains them. For files from other machines, backslashes and another
        case are accepted, and of an absolute path only the last part is used.
        """
        if "://" in reference or len(reference) > MAX_REFERENCE_CHARS:
            return None
        folder = (beside or self.path).parent
        written = PureWindowsPath(reference)  # accepts both kinds of slash
        spellings = [written.parts, written.parts[-1:]]
        if written.drive or written.root:
            spellings = spellings[1:]
        for parts in spellings:
            path = self._resolve(folder, parts)
            if path is not None:
                return path
        return None

    def read(self, reference: str, what: str, beside: Path | None = None) -> bytes:
        """The bytes of a referenced file; a ShoalError names a missing one."""
        path = self.find(reference, beside)
        if path is None:
            raise ShoalError(f"{self.name}: its {what} {missing_reference(reference)}")
        return self.content(path)

    def digest(self, references: Iterable[Path | None], settings: str) -> str:
        """SHA-256 over the settings, the mesh file and its references; None stands for a missing file."""
        total = hashlib.sha256(settings.encode())
        for path in (self.path, *references):
            total.update(b"missing" if path is None else self._digest(path))
        return total.hexdigest()

    def identity(self, path: Path) -> Hashable:
        """Device and inode: equal for all paths of one file."""
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return status.st_dev, status.st_ino

    def content(self, path: Path) -> bytes:
        """The bytes of a file, read at the first call."""
        key = self.identity(path)
        if key not in self._contents:
            try:
                size = path.stat().st_size
                if size > MAX_FILE_BYTES:
                    raise ShoalError(f"{path.name} has {size:,} bytes; at most {MAX_FILE_BYTES:,} are read: split it.")
                self._contents[key] = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from None
        return self._contents[key]

    def _digest(self, path: Path) -> bytes:
        key = self.identity(path)
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(self.content(path)).digest()
        return self._digests[key]

    def _resolve(self, folder: Path, parts: tuple[str, ...]) -> Path | None:
        """The file in a folder with these path parts, ignoring case; an exact match is preferred."""
        exact = folder.joinpath(*parts)
        if os.path.isfile(exact):  # False for invalid file names too
            return exact
        path = folder
        for part in parts:
            name = part if part in (".", "..") else self._entries(path).get(part.lower())
            if name is None:
                return None
            path = path / name
        return path if os.path.isfile(path) else None

    def _entries(self, folder: Path) -> dict[str, str]:
        """Lower-case name to name of a folder's entries; among equal ones, the first in sorted order."""
        if folder not in self._names:
            try:
                names = sorted(os.listdir(folder), reverse=True)
            except OSError:
                names = []
            self._names[folder] = {name.lower(): name for name in names}
        return self._names[folder]


def missing_reference(reference: str) -> str:
    """End of an error message about a reference to a missing file."""
    shown = repr(excerpt(reference))
    if "://" in reference:
        return f"{shown} is a URL, and only files are read; download it and refer to the file."
    return f"{shown} is missing; put it beside the file."


def check_textures(name: str, missing: tuple[str, ...], strict: bool) -> None:
    """Warn about missing textures of a scene, or raise a ShoalError if `strict`."""
    if not missing:
        return
    if strict:
        raise ShoalError(f"{name}: its texture {missing_reference(missing[0])}")
    shown = ", ".join(repr(excerpt(reference)) for reference in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    warnings.warn(
        f"{name}: textures are missing ({shown}{more}); their surfaces have the color of their material.", stacklevel=1
    )


class TextureSet:
    """The textures of one scene: each is decoded once, within the limits on pixels."""

    def __init__(self, source: Source):
        self.source, self.name = source, source.name
        self.textures: list[np.ndarray] = []
        self._known: dict[Hashable, int] = {}
        self._decoded: dict[Hashable, np.ndarray] = {}
        self._missing: dict[str, None] = {}
        self._has_alpha: list[bool] = []
        self._pixels = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """References to texture files that do not exist."""
        return tuple(self._missing)

    def index_of(self, key: Hashable, load: Callable[[], np.ndarray]) -> int:
        """The index of the texture of a key; the first call adds the result of `load`, uint8 [height, width, 4]."""
        if key not in self._known:
            texture = load()
            self._known[key] = len(self.textures)
            self.textures.append(texture)
            self._has_alpha.append(bool(texture[..., 3].min() < 255))
        return self._known[key]

    def has_alpha(self, index: int) -> bool:
        """Whether any pixel of a texture has alpha below 255; False for index -1."""
        return index >= 0 and self._has_alpha[index]

    def find(self, reference: str, beside: Path | None = None) -> Path | None:
        """The path of an image file; None if it does not exist, which is added to `missing`."""
        path = self.source.find(reference, beside)
        if path is None:
            self._missing[reference] = None
        return path

    def read(self, path: Path, what: str) -> np.ndarray:
        """The pixels of an image file, uint8 [height, width, 4]."""
        return self.decode(self.source.identity(path), self.source.content(path), what)

    def decode(self, key: Hashable, data: bytes, what: str) -> np.ndarray:
        """The pixels of an encoded image, uint8 [height, width, 4]; decoded once per key. `what` names it in errors."""
        if key not in self._decoded:
            self._decoded[key] = self._decode(data, what)
        return self._decoded[key]

    def count_pixels(self, pixels: int) -> None:
        """Raise a ShoalError once the textures have more than MAX_TOTAL_PIXELS pixels in all."""
        self._pixels += pixels
        if self._pixels > MAX_TOTAL_PIXELS:
            raise ShoalError(
                f"{self.name}: its textures hold more than {MAX_TOTAL_PIXELS:,} pixels in all; shrink them."
            )

    def _decode(self, data: bytes, what: str) -> np.ndarray:
        if data[:6] == b"\xabKTX 2":
            raise ShoalError(
                f"{self.name}: {what} is a KTX2 (Basis) image, which is not supported; export it as PNG or JPEG."
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MAX_IMAGE_PIXELS replaces Pillow's warning
                with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                    width, height = image.size
                    if width * height > MAX_IMAGE_PIXELS:
                        raise ShoalError(_too_large(self.name, what, f"{width} x {height} pixels"))
                    self.count_pixels(width * height)
                    return _rgba(image)
        except Image.DecompressionBombError:
            raise ShoalError(_too_large(self.name, what, "far too many pixels")) from None
        except ShoalError:
            raise
        except Image.UnidentifiedImageError:
            raise ShoalError(
                f"{self.name}: {what} is not a readable image ({len(data)} bytes); "
                f"use one of {', '.join(IMAGE_FORMATS)}."
            ) from None
        except Exception as error:  # Pillow raises many exception types for damaged files
            raise ShoalError(f"{self.name}: {what} is damaged: {excerpt(error)}.") from None


def _too_large(name: str, what: str, size: str) -> str:
    return f"{name}: {what} has {size}; at most {MAX_IMAGE_PIXELS:,} are decoded: shrink it."


def _rgba(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's conversion would clip the values
        gray = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.dstack([gray, gray, gray, np.full_like(gray, 255)])
    return np.array(image.convert("RGBA"))


def _unreadable(path: Path, error: OSError) -> ShoalError:
    return ShoalError(f"{path} cannot be read: {error.strerror or error}.")
