"""The bundled worlds, one file each; `shoal.core.registry.WORLDS` lists them."""
