"""Using depths: choose one, export it, exit early, decode with it."""

from everydepth.exits.calibrate import FullDepthWarning, NotCertifiedWarning, calibrate
from everydepth.exits.choice import Choice, choose_blocks
from everydepth.exits.evaluate import Evaluation, evaluate
from everydepth.exits.export import export
from everydepth.exits.load import load
from everydepth.exits.policies import (
    NEVER,
    Agreement,
    Certificate,
    Confidence,
    Entropy,
    Margin,
    Patience,
    Policy,
)
from everydepth.exits.predict import Prediction, predict
from everydepth.exits.profile import DepthProfile, Latency, Profile, profile

__all__ = [
    "NEVER",
    "Agreement",
    "Certificate",
    "Choice",
    "Confidence",
    "DepthProfile",
    "Entropy",
    "Evaluation",
    "FullDepthWarning",
    "Latency",
    "Margin",
    "NotCertifiedWarning",
    "Patience",
    "Policy",
    "Prediction",
    "Profile",
    "calibrate",
    "choose_blocks",
    "evaluate",
    "export",
    "load",
    "predict",
    "profile",
]
