"""Using depths: choose one, export it, exit early, decode with it."""

from everydepth.exits.calibrate import FullDepthWarning as FullDepthWarning
from everydepth.exits.calibrate import NotCertifiedWarning as NotCertifiedWarning
from everydepth.exits.calibrate import calibrate as calibrate
from everydepth.exits.choice import Choice as Choice
from everydepth.exits.choice import choose_blocks as choose_blocks
from everydepth.exits.evaluate import Evaluation as Evaluation
from everydepth.exits.evaluate import evaluate as evaluate
from everydepth.exits.export import export as export
from everydepth.exits.load import load as load
from everydepth.exits.policies import NEVER as NEVER
from everydepth.exits.policies import Agreement as Agreement
from everydepth.exits.policies import Certificate as Certificate
from everydepth.exits.policies import Confidence as Confidence
from everydepth.exits.policies import Entropy as Entropy
from everydepth.exits.policies import Margin as Margin
from everydepth.exits.policies import Patience as Patience
from everydepth.exits.policies import Policy as Policy
from everydepth.exits.predict import Prediction as Prediction
from everydepth.exits.predict import predict as predict
from everydepth.exits.profile import DepthProfile as DepthProfile
from everydepth.exits.profile import Latency as Latency
from everydepth.exits.profile import Profile as Profile
from everydepth.exits.profile import profile as profile
