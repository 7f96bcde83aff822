"""A ladder of your own: K of the first two layers at 8 bits, the others at 4, V at 4; stepped down under pressure."""

from qkv_engine import DENSE16, Engine, KVConfig, RungConfig

NUM_LAYERS = 8  # of the demo model
k = ["int8-channel-128"] * 2 + ["int4-channel-128"] * (NUM_LAYERS - 2)
mixed = RungConfig("mixed", k=tuple(k), v="int4-token-128")
ladder = KVConfig(name="mine", rungs=(DENSE16, mixed), sink=32, recent=128)

with Engine(kv=ladder, kv_memory="64MiB") as engine:
    print(*engine.describe(), sep="\n")
    print(engine.chat("What is 47*86?").text)
