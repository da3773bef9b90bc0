"""The attacks in a table: who can make them, on what, and how."""

from __future__ import annotations

LISTING: dict[str, tuple[str, str, str]] = {
    "labels": ("server", "an upload", "labels read off the last layer's gradient"),
    "closed-form": ("server, wire", "an upload", "the first linear layer's gradient is the input, up to a factor"),
    "dlg": ("server", "an upload", "gradient matching by L-BFGS, labels too (Zhu et al. 2019)"),
    "idlg": ("server, wire", "an upload, a sum", "the same after reading the labels (Zhao et al. 2020)"),
    "inverting": ("server", "an upload", "cosine distance, total variation, Adam (Geiping et al. 2020)"),
    "generative": ("server", "an upload", "matching within a prior learned from public pictures"),
    "phi": ("server, wire", "Ψ and Φ", "what travels bare beside a noised gradient, read or matched (ours)"),
    "averaging": ("server", "many uploads", "noise averaged away over rounds (ours)"),
    "received": ("client", "the model", "used as it is"),
    "calibration": ("client", "the model", "head noise estimated from few samples and taken off (ours)"),
    "probe": ("client", "the model", "a last layer of one's own on the model's features (ours)"),
    "parameters": ("client", "the model", "numbers known up to scales that leave the function as it is (ours)"),
    "membership": ("client", "the model", "attack network on outputs, half of the members known"),
    "membership-layers": ("client", "the model", "the same on the last three layers"),
    "likelihood": ("client", "the model", "likelihood ratio with shadow models (Carlini et al. 2022)"),
    "class-inversion": ("client", "the model", "pictures of each class within a learned prior (Zhang et al. 2020)"),
}
"""By name: who, on what, how. A client's attacks are also made after the head noise is taken off."""
