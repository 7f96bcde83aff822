"""KVs of papers by their own rules: KIVI, Kitty, KVmix, XQuant, PatternKV, PM-KVQ, KVarN, OSCAR, Hadamard rotations.

``python -m studies.papers`` measures those that need no rotations fitted; ``studies.spectral_field`` all of them.
"""
