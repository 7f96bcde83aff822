"""A parallel decoder, the worked example of ``docs/adding_a_model.md``: attention and MLP read the same norm."""
