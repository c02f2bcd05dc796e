"""Docker sandboxes: containers, shells, files, images, networks, and the names of their failures."""
