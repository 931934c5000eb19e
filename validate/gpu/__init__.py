"""What only a machine with a GPU can show, as one verb: `headport gpu-check`."""
