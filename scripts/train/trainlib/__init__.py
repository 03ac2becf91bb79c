"""What the training scripts share. Needs the extra `train`."""
