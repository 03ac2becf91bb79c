"""How the demo family was trained: texts, vocabulary, networks, distillation, packing. Needs the extra `train`."""
