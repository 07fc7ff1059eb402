"""Where arrays are on a mesh, and the loss of each device."""
