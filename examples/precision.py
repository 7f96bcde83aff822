"""Three requests in memory that is short: one may step down as far as it must, one to 8 bits, one not at all."""

from qkv_engine import Engine

with Engine(kv="auto", kv_memory="8MiB", max_model_len=2048) as engine:
    limits = {
        "as far as it must": engine.params(max_tokens=500, ignore_eos=True),
        "to 8 bits": engine.params(max_tokens=500, ignore_eos=True, kv_floor="int8"),
        "not at all": engine.params(max_tokens=500, ignore_eos=True, kv_pinned=True),
    }
    questions = [[{"role": "user", "content": f"What is {n}*86?"}] for n in (45, 46, 47)]
    for output, name in zip(engine.chat(questions, list(limits.values())), limits, strict=True):
        print(f"{name}: blocks {output.kv.blocks}, fewest bits {output.kv.lowest_bits}")
    print(f"{engine.stats().num_demotions} blocks stepped down")
