"""The file a scene is read from, with everything it refers to: found, read once, and decoded with limits."""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path, PureWindowsPath

import numpy as np
from PIL import Image

from shoal.core.errors import ShoalError, excerpt, missing

LARGEST_FILE = 8 * 2**30
"""Bytes. Fifty million triangles fit in it; beyond it something else was named by mistake."""
LARGEST_PICTURE = 2**27
"""Pixels of one texture: 16,384 by 8,192. A small file can claim any size, so it is checked before decoding."""
LARGEST_PICTURES = 2**30
"""Pixels of a scene's textures together: 4 GiB once decoded."""
LONGEST_REFERENCE = 4096
"""Characters of a reference to another file, as in a path of Linux."""
PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "TGA", "GIF")


class Source:
    """A file and its references. All bytes are read through here, so that the hash and the scene see the same ones."""

    def __init__(self, path: str | Path):
        self._contents: dict[Hashable, bytes] = {}
        self._digests: dict[Hashable, bytes] = {}
        self._names: dict[Path, dict[str, str]] = {}
        try:
            self.path = Path(path).expanduser()
            folder, there, plain = self.path.is_dir(), self.path.exists(), self.path.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # a forbidden folder, a name no file can have
            raise ShoalError(f"{str(path)[:200]!r} cannot be read: {error}.") from None
        self.name = self.path.name
        if folder:
            raise ShoalError(f"{self.path} is a folder; name the mesh file inside it.")
        if not there:
            raise ShoalError(missing("file", self.path))
        if not plain:
            raise ShoalError(f"{self.path} is not a plain file.")

    @property
    def data(self) -> bytes:
        """The bytes of the file itself."""
        data = self.content(self.path)
        if not data:
            raise ShoalError(f"{self.name} is empty (0 bytes).")
        return data

    def find(self, reference: str, beside: Path | None = None) -> Path | None:
        """The file that a reference means, or None.

        References are relative to the file that makes them. Files that traveled are met half way: backslashes,
        another case, and absolute paths of somebody else's machine, of which only the last part is looked for.
        """
        if "://" in reference or len(reference) > LONGEST_REFERENCE:
            return None
        folder = (beside or self.path).parent
        written = PureWindowsPath(reference)  # understands both kinds of slash
        spellings = [written.parts, written.parts[-1:]]
        if written.drive or written.root:
            spellings = spellings[1:]
        for parts in spellings:
            path = self._spelled(folder, parts)
            if path is not None:
                return path
        return None

    def read(self, reference: str, what: str, beside: Path | None = None) -> bytes:
        """The bytes behind a reference, or an error that names both."""
        path = self.find(reference, beside)
        if path is None:
            raise ShoalError(f"{self.name}: its {what} {missing_reference(reference)}")
        return self.content(path)

    def digest(self, references: Iterable[Path | None], settings: str) -> str:
        """SHA-256 over the settings, the file and everything it refers to; a missing file counts as missing."""
        total = hashlib.sha256(settings.encode())
        for path in (self.path, *references):
            total.update(b"missing" if path is None else self._digest(path))
        return total.hexdigest()

    def identity(self, path: Path) -> Hashable:
        """The same for all paths that lead to one file."""
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return status.st_dev, status.st_ino

    def content(self, path: Path) -> bytes:
        """The bytes of a file that was found, read once."""
        key = self.identity(path)
        if key not in self._contents:
            try:
                size = path.stat().st_size
                if size > LARGEST_FILE:
                    raise ShoalError(f"{path.name} has {size:,} bytes; at most {LARGEST_FILE:,} are read: split it.")
                self._contents[key] = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from None
        return self._contents[key]

    def _digest(self, path: Path) -> bytes:
        key = self.identity(path)
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(self.content(path)).digest()
        return self._digests[key]

    def _spelled(self, folder: Path, parts: tuple[str, ...]) -> Path | None:
        """The file under a folder with these names, whatever their case; the exact spelling goes first."""
        exact = folder.joinpath(*parts)
        if os.path.isfile(exact):  # False also for names that no file can have
            return exact
        path = folder
        for part in parts:
            name = part if part in (".", "..") else self._entries(path).get(part.lower())
            if name is None:
                return None
            path = path / name
        return path if os.path.isfile(path) else None

    def _entries(self, folder: Path) -> dict[str, str]:
        """The names in a folder by their lower case; of several, the first in order."""
        if folder not in self._names:
            try:
                names = sorted(os.listdir(folder), reverse=True)
            except OSError:
                names = []
            self._names[folder] = {name.lower(): name for name in names}
        return self._names[folder]


def missing_reference(reference: str) -> str:
    """What to say of a reference that leads to no file."""
    shown = repr(excerpt(reference))
    if "://" in reference:
        return f"{shown} is an address, and only files are read; fetch it and refer to the file."
    return f"{shown} is missing; put it beside the file."


def check_textures(name: str, missing: tuple[str, ...], strict: bool) -> None:
    """Warn of textures of a scene that are missing, once per process; refuse them if `strict`."""
    if not missing:
        return
    if strict:
        raise ShoalError(f"{name}: its texture {missing_reference(missing[0])}")
    shown = ", ".join(repr(excerpt(reference)) for reference in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    warnings.warn(
        f"{name}: textures are missing ({shown}{more}); their surfaces have the color of their material.", stacklevel=1
    )


class Pictures:
    """The textures of one scene: each decoded once, all within the limits."""

    def __init__(self, source: Source):
        self.source, self.name = source, source.name
        self.textures: list[np.ndarray] = []
        self._known: dict[Hashable, int] = {}
        self._decoded: dict[Hashable, np.ndarray] = {}
        self._missing: dict[str, None] = {}
        self._faint: list[bool] = []
        self._pixels = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """References to pictures that lead to no file."""
        return tuple(self._missing)

    def number(self, key: Hashable, make: Callable[[], np.ndarray]) -> int:
        """The index of the texture of this key, uint8 [height, width, 4], made at the first call."""
        if key not in self._known:
            texture = make()
            self._known[key] = len(self.textures)
            self.textures.append(texture)
            self._faint.append(bool(texture[..., 3].min() < 255))
        return self._known[key]

    def faint(self, index: int) -> bool:
        """Whether a texture has an alpha anywhere; False for -1."""
        return index >= 0 and self._faint[index]

    def find(self, reference: str, beside: Path | None = None) -> Path | None:
        """The file of a picture, or None, which is noted."""
        path = self.source.find(reference, beside)
        if path is None:
            self._missing[reference] = None
        return path

    def read(self, path: Path, what: str) -> np.ndarray:
        """The pixels of a file that was found."""
        return self.decode(self.source.identity(path), self.source.content(path), what)

    def decode(self, key: Hashable, data: bytes, what: str) -> np.ndarray:
        """The pixels of a picture, uint8 [height, width, 4], or an error that names it; decoded once for each key."""
        if key not in self._decoded:
            self._decoded[key] = self._decode(data, what)
        return self._decoded[key]

    def count(self, pixels: int) -> None:
        """Refuse more pixels in all than a scene may have."""
        self._pixels += pixels
        if self._pixels > LARGEST_PICTURES:
            raise ShoalError(
                f"{self.name}: its textures hold more than {LARGEST_PICTURES:,} pixels in all; shrink them."
            )

    def _decode(self, data: bytes, what: str) -> np.ndarray:
        if data[:6] == b"\xabKTX 2":
            raise ShoalError(
                f"{self.name}: {what} is a KTX2 (Basis) picture, which is not read; export it with PNG or JPEG."
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # our limit stands in for Pillow's warning
                with Image.open(io.BytesIO(data), formats=PICTURES) as picture:
                    width, height = picture.size
                    if width * height > LARGEST_PICTURE:
                        raise ShoalError(_too_large(self.name, what, f"{width} x {height} pixels"))
                    self.count(width * height)
                    return _rgba(picture)
        except Image.DecompressionBombError:
            raise ShoalError(_too_large(self.name, what, "far too many pixels")) from None
        except ShoalError:
            raise
        except Image.UnidentifiedImageError:
            raise ShoalError(
                f"{self.name}: {what} is not a picture that can be read ({len(data)} bytes); "
                f"known are {', '.join(PICTURES)}."
            ) from None
        except Exception as error:  # Pillow raises many kinds on damaged files
            raise ShoalError(f"{self.name}: {what} is damaged: {excerpt(error)}.") from None


def _too_large(name: str, what: str, size: str) -> str:
    return f"{name}: {what} has {size}; at most {LARGEST_PICTURE:,} are decoded: shrink it."


def _rgba(picture: Image.Image) -> np.ndarray:
    if picture.mode.startswith("I"):  # 16 bits of gray; Pillow's own conversion would clip them
        gray = (np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.dstack([gray, gray, gray, np.full_like(gray, 255)])
    return np.array(picture.convert("RGBA"))


def _unreadable(path: Path, error: OSError) -> ShoalError:
    return ShoalError(f"{path} cannot be read: {error.strerror or error}.")
