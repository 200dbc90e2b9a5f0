"""The bundled worlds, one file each."""
