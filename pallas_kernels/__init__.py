"""GPU kernels of a hybrid Gated DeltaNet model, each usable on its own: nothing here knows the model.

A kernel's module holds its public function, the packer of its layout, the `Config` that it is tuned by, `heuristics`
that choose one, and a reference in plain jnp that it must equal. `shapes` lists the sizes they are made for.
"""
