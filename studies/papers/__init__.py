"""KIVI, Kitty, KVmix, XQuant, PatternKV and PM-KVQ by their papers' rules: ``python -m studies.papers``."""
