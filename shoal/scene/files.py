"""The file a scene is read from, with everything it refers to: found, read once, and decoded with limits."""

import hashlib
import io
import warnings
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

import numpy as np
from PIL import Image

from shoal.errors import ShoalError, missing

LARGEST_FILE = 8 * 2**30
"""Bytes. Fifty million triangles fit in it; beyond it something else was named by mistake."""
LARGEST_PICTURE = 2**27
"""Pixels of one texture: 16,384 by 8,192. A small file can claim any size, so it is checked before decoding."""
LARGEST_PICTURES = 2**30
"""Pixels of a scene's textures together: 4 GiB once decoded."""
PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "TGA", "GIF")


class Source:
    """A file and its references. All bytes are read through here, so that the hash and the scene see the same ones."""

    def __init__(self, path: str | Path):
        self._contents: dict[Path, bytes] = {}
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

        References are relative to the file that makes them. Files that travelled are met half way: backslashes,
        another case, and absolute paths of somebody else's machine, of which only the last part is looked for.
        """
        if "://" in reference:
            return None
        folder = (beside or self.path).parent
        written = PureWindowsPath(reference)  # understands both kinds of slash
        spellings = [written.parts, written.parts[-1:]]
        if written.drive or written.root:
            spellings = spellings[1:]
        for parts in spellings:
            path = _spelled(folder, parts)
            if path is not None:
                return path
        return None

    def read(self, reference: str, what: str, beside: Path | None = None) -> bytes:
        """The bytes behind a reference, or an error that names both."""
        path = self.find(reference, beside)
        if path is None and "://" in reference:
            raise ShoalError(
                f"{self.name} refers to {reference!r}: only files are read; fetch it and refer to the file."
            )
        if path is None:
            raise ShoalError(f"{self.name}: its {what} {reference!r} is missing; put it beside the file.")
        return self.content(path)

    def digest(self, references: Iterable[Path | None], settings: str) -> str:
        """SHA-256 over the settings, the file and everything it refers to; a missing file counts as missing."""
        total = hashlib.sha256(settings.encode())
        for path in (self.path, *references):
            content = b"missing" if path is None else hashlib.sha256(self.content(path)).digest()
            total.update(content)
        return total.hexdigest()

    def content(self, path: Path) -> bytes:
        """The bytes of a file that was found, read once."""
        if path not in self._contents:
            try:
                size = path.stat().st_size
                if size > LARGEST_FILE:
                    raise ShoalError(f"{path.name} has {size:,} bytes; at most {LARGEST_FILE:,} are read: split it.")
                self._contents[path] = path.read_bytes()
            except OSError as error:
                raise ShoalError(f"{path} cannot be read: {error.strerror or error}.") from None
        return self._contents[path]


class Pictures:
    """The textures of one scene: each decoded once, all within the limits."""

    def __init__(self, name: str):
        self.name = name
        self.textures: list[np.ndarray] = []
        self._known: dict[object, int] = {}
        self._pixels = 0

    def known(self, key: object) -> int | None:
        """The index of the texture that was added under this key."""
        return self._known.get(key)

    def add(self, key: object, texture: np.ndarray) -> int:
        """The index of a new texture, uint8 [height, width, 4]."""
        self._pixels += texture.shape[0] * texture.shape[1]
        if self._pixels > LARGEST_PICTURES:
            raise ShoalError(
                f"{self.name}: its textures hold more than {LARGEST_PICTURES:,} pixels in all; shrink them."
            )
        self.textures.append(texture)
        self._known[key] = len(self.textures) - 1
        return self._known[key]

    def decode(self, data: bytes, what: str) -> np.ndarray:
        """A picture file's pixels, uint8 [height, width, 4], or an error that names the picture."""
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
            raise ShoalError(f"{self.name}: {what} is damaged: {error}.") from None


def _too_large(name: str, what: str, size: str) -> str:
    return f"{name}: {what} has {size}; at most {LARGEST_PICTURE:,} are decoded: shrink it."


def _rgba(picture: Image.Image) -> np.ndarray:
    if picture.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them
        grey = (np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.dstack([grey, grey, grey, np.full_like(grey, 255)])
    return np.array(picture.convert("RGBA"))


def _spelled(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """The file under a folder with these names, whatever their case; the exact spelling goes first."""
    exact = folder.joinpath(*parts)
    if exact.is_file():
        return exact
    path = folder
    for part in parts:
        if part in (".", ".."):
            path = path / part
            continue
        try:
            same = [entry for entry in path.iterdir() if entry.name.lower() == part.lower()]
        except OSError:
            return None
        if not same:
            return None
        path = min(same)
    return path if path.is_file() else None
