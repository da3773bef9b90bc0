"""The sentences with which parts answer for what they assume and leave open, written once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedveil.ledger.sparse import AWAY_BITS, LEAST_BITS, Circle


@dataclass(frozen=True)
class RunFacts:
    """What an uplink's caveats depend on besides itself.

    Rounds of `cohort` clients (0: not known), drawn from `clients`; whether the model travels `veiled`, and whether the
    server adds noise (`central`). Where chance decides how many a round has, they are from `least` to `cohort`.
    """

    rounds: int
    cohort: int
    clients: int
    veiled: bool
    central: bool
    least: int = 0


def sampled_clients(rate: float, *, most: int, rounds: int) -> str:
    """What counts where each client is drawn for each round by chance."""
    return (
        f"each client is drawn for each round by itself, with probability {rate:g}; nothing is claimed for that, since "
        "everybody knows who is drawn. What counts is every round that a client was drawn for: noise is made so that "
        f"any {most} of {rounds} stay within the target, and whoever has spent it sits out"
    )


SIZES = "every client's number of samples is public"
KEYS = "pair secrets are unknown to the server: without a roster, it neither swapped keys nor invented clients"
ROSTER = "pair secrets are unknown to the server: every key is signed by the one that the roster pins"
OWN_NOISE = (
    "a client that clips and adds its noise is covered against the server whatever others do; where the clients' line "
    "has an ε, that also counts on the noise of all others but one"
)
EQUAL_SHARES = "noise is shared equally: no claim of a size makes anybody's smaller"
SHARES_BY_SIZE = (
    "noise is shared by the sizes that clients claim, as the paper has it: one that claims much and adds none takes it "
    "away from all others (accounting = exact shares it equally)"
)
HONEST_ARRIVALS = "the server is honest about whose upload did not arrive, and drops one that comes too late unread"
BARE_SUM = "the sum itself: no differential privacy is claimed for it"
CRAFTED = "a server that crafts the model it sends can make the sum reveal one client"
CRAFTED_VEILED = f"{CRAFTED}: clients cannot inspect a veiled model"
DATA_SEEN = "client data: the server sees every client's gradient"
DATA_RECOVERED = "client data: the server recovers every client's gradient"
SEEN_BEFORE_NOISE = "clients' gradients: the server sees every one"
TRUSTED = "the server is trusted: it adds the noise, and shows nobody what it was sent"
SECRET_BATCH = "nobody but the client knows which records a round's batch holds: each is drawn by its own secrets"
REPAIRS = (
    "the server asks for repairs only of clients whose upload it has not got, or books what it got: one that lies sees "
    "an upload under its residual noise alone (dropouts = tolerate needs no such trust)"
)
VEIL = "the model is hidden from clients only up to secret scales: measured, not proven"
ORDERS = (
    "the model is hidden from clients only up to secret orders, signs or scales of its hidden units: measured, not "
    "proven; its function is not hidden at all"
)
ALIGNED = (
    "the server's updates: fresh secrets every round hide nothing from a client that aligns, for it matches two "
    "rounds' models in about a second and has what lies between them (`fedveil audit` measures it); one that knows or "
    "guesses the model training began with, a published one for instance, has the whole model"
)
ALIGNMENT = {
    "scale": (0.99, 5),
    "signed": (1.0, 5),
    "isometry": (1.0, 5),
    "full": (0.99, 5),
    "full, streams rotated": (0.99, 1),
}
"""By veil: the least cosine of an update as a client that aligned made it out, and on how many networks that was tried.

A test holds these to docs/results/alignment.json. What was not measured is not here."""


def reached(veil: str) -> tuple[str, ...]:
    """What aligning got under a veil where it was measured, as a sentence; nothing where it was not."""
    if veil not in ALIGNMENT:
        return ()
    cosine, networks = ALIGNMENT[veil]
    figure = "1.00" if cosine == 1.0 else f"{cosine:.2f} or more"
    where = "a small network" if networks == 1 else f"each of {networks} small networks"
    return (
        f"what a client that aligned made out of an update had a cosine of {figure} with it on {where}, "
        f"one seed ({veil}; docs/results/alignment.md): a measurement, which bounds attackers from below only",
    )


KNOWN_START = "the model: clients know the weights it begins with, and read off what hides those they are sent"
OUTPUTS = "the model's outputs: without head noise clients compute them exactly"
OWN_CODE = "assuming what is said of the caller's own code"
MODEL_OPEN = "the model: every client sees it"
SKETCHED = (
    "the model: clients know each round's sketch, which leaves out some of the directions in which a layer reads; "
    "other rounds leave out others, so that a client which puts rounds together has the model as far as it stands "
    "still (`fedveil audit` measures it). Biases and normalisations travel as they are"
)
POLARISED = (
    "client data: a private loss changes the gradients of all layers but the last, and what is read off one layer's "
    "gradient by a ratio, or fitted together with the private loss, does not ask for it: nothing is proven"
)
CHOSEN_PLACES = "which coordinates are sent: they are chosen by a client's data, and whoever sees them learns of it"

UNCLIPPED = "every client's gradient is assumed to have norm at most S; nobody clips (not enforced)"
HEAD_BARE = "Ψ and Φ travel bare: from Φ alone a batch of one is read off exactly, x = G_β[W₁]_i / G_β[b₁]_i"
SCALES_KNOWN = "R∘η is Gaussian only for who does not know R; the server does, and given R the noise is bounded"

DEALER = (
    "the client that deals the key keeps it to itself: it knows all of it, and can open every upload (a trusted "
    "dealer, once a run)"
)
PRODUCT = (
    "the server has clients decrypt the product of what they sent: they are shown whose it is and decrypt once a "
    "round, but cannot check the product, and a server that shows another one opens that"
)
AUTHORITY = (
    "the key authority sides neither with the server nor with who reads its messages: it never sees an upload, but "
    "together they open every one. It gives one key a round, for the sum of enough clients with equal weights"
)
FUNCTIONAL = (
    "what is encrypted is hidden (computational): by DDH on secp256k1, and by a pad of each number's own, from "
    "SHAKE-256. Keys and pads are drawn for one round, so that numbers of other rounds or places cannot be recombined"
)
UNPROVEN_SUM = (
    "the sum's integrity: nobody proves that it has encrypted or decrypted as it should (values beyond what clients "
    "may send are noticed)"
)
PUBLIC_MATRIX = (
    "the matrix of a round follows from the epoch's beacon, so that nobody picks it, and learning with errors stays "
    "hard where the sum of the honest clients' errors is known: what is left of one's own is nearly as wide"
)
LATTICE = "CKKS with the parameters chosen is secure (128 bits by the HomomorphicEncryption.org tables)"
SHARED_KEY = (
    "against the server alone and outsiders: no client gives away the secret key, which all of them share and which "
    "opens everybody's ciphertexts (cipher = pads needs no such trust)"
)
GROUP = (
    "what the group shares stays with it: a client that tells the server lets it read sums, though nobody's own "
    "values, and change them: a crafted model can make a sum reveal one client"
)
UNCHANGED = (
    "the server passes sums and models on as it got them, the same to everybody: what clients do with changed ones "
    "could tell it about what is hidden, and whether one can read a changed sum is a bit of it, which each gives away "
    "up to four times a run, and in every new run again"
)
AUTHENTIC = (
    "sums: a server that changes what it passes on, or says that others are in it, is found out whatever is hidden, "
    "but for a chance of 2^-65"
)
LENDERS = (
    "clients that lend a model to those who missed rounds, or of whom the server says so, lend the true one: a crafted "
    "one shows its borrower, and goes on to whoever borrows from that"
)
DIFFERENCES = (
    "sums of rounds that differ in one client: whoever reads both reads that client's part, so that nobody who wants "
    "to know it may choose the cohorts"
)
START = "the model's first version is known to clients alone: one that follows from a public seed is public"
PUBLIC_START = "the model's first version: it is public, and later ones are known to clients alone"
GIVEN_WINNERS = (
    "ε given what is hidden counts a client's own uploads, with the winners and their sums as given: both depend on "
    "everybody's data, without noise, and steer all later rounds"
)
GIVEN_SUMS = (
    "ε given what is hidden counts a client's own uploads, with the hidden sums as given: they depend on everybody's "
    "data, without noise, and steer all later rounds"
)
IN_ANY_CASE = (
    "ε in any case counts every upload of everybody, as far as a client's data could reach others' through what is "
    "hidden: it rests on every client's noise, on cohorts drawn beforehand, and is computational like the hiding"
)
TAGS = (
    "votes: the server sees every overlap between clients' votes, hence whose data are alike; with one client on its "
    "side it reads every vote; and it may call any tags it was sent the winners (vote = histogram shows it no vote)"
)
COUNTS = "votes: every client reads how many voted for each parameter, without noise (vote = tags: only which have won)"
RANDOM_VOTES = (
    "votes: every client draws what it votes for by its own secrets, so that votes, their overlaps and who wins tell "
    "nothing about data"
)
SUMS_OPEN = (
    "the hidden sums, and with them the mean training loss: every client reads them, without noise; the fewer uploads "
    "a sum holds, the more it says about each"
)
REST_OPEN = (
    "what is not hidden of the model: the server sees its noised changes in the model's order, without knowing where "
    "hidden ones are missing between them"
)
CHANGES_OPEN = "the model: the server sees every change to it, and lacks only its first version"
MODEL_WITH_CLIENTS = "the model from clients: each of them holds it"
FORGED = "the model's integrity: a server can add to sums what it likes, and clients cannot tell"


def noise_circle(circle: Circle, colluders: int) -> str:
    """What the graph is on which clients share noise, and how many may collude or be missing around one."""
    near, gap = circle.near(colluders), circle.gap(colluders)
    said = (
        f"each of a round's {circle.count} clients shares noise with {circle.degree} others, on a graph of second "
        f"eigenvalue {circle.second:.2f} in an order that the epoch's beacon draws; "
    )
    few = f"any {colluders}" if colluders > 1 else "any one"
    who = f"{few} of them may collude"
    if not circle.whoever(colluders):
        who = (
            f"{colluders} of them may collude, if not by who is whose neighbour: the chance that more than {near} are "
            f"among the {circle.degree} around an honest client anywhere in the run is at most 2^-{LEAST_BITS}"
        )
    away = f"{math.ceil(gap) - 1} more of anybody's {circle.degree} may be missing (gap {gap:.2f})"
    if circle.withstands(colluders):
        away += (
            ": a quarter of a round's clients may be at random, but for a chance of "
            f"2^-{AWAY_BITS} a round, in which a few are charged more"
        )
    return f"{said}{who}, and {away}"


OWN_CIRCLES = (
    "a round for which fewer clients are drawn has a graph of its own: smaller, for as many colluders, with the same "
    "chance, or of everybody with everybody"
)


def threshold_key(bits: int, quorum: int, clients: int) -> str:
    """On what hiding under a key rests that clients hold together."""
    return (
        f"threshold Paillier with a key of {bits:,} bits is secure (computational), and fewer than {quorum} of all "
        f"{clients} clients side with the server: so many shares decrypt whatever they like"
    )


def hidden_by_errors(dimension: int, bits: float, most: float) -> str:
    """On what masks rest whose errors are the noise."""
    return (
        f"learning with errors is hard (computational) in {dimension:,} dimensions where the modulus is at most "
        f"2^{most:.1f} deviations of the error: 128 bits by the HomomorphicEncryption.org tables; here it is "
        f"2^{bits:.1f} at most"
    )


def short_words(bits: int) -> str:
    """What it means that sums are found as logarithms."""
    return (
        f"sums are found as discrete logarithms, within ± 2^{bits - 1} steps: the step is the largest power of two of "
        "which rounding lengthens no change by more than a 32nd, and the noise of each client has 64 or more; noise "
        "is that 32nd larger than on a fine grid"
    )


def short_key(bits: int) -> str:
    """What a key of a simulation is worth."""
    return f"what is encrypted: a key of {bits:,} bits can be found out, and is for simulations (give --key-bits 2048)"


def groups(count: int, size: int) -> str:
    """What is seen of clients in groups."""
    return (
        f"{count} sums a round, of {size} clients or one more each, where there would be one of all: each hides a "
        f"client among {size - 1} others only, and who may collude is said for a group. Who is in which follows from "
        "the beacon of the run's first epoch, so that nobody picks it, and stays so through the run: groups that "
        "changed could be solved for single clients. What remains: a group's sums of two rounds, in one of which a "
        "client is away, differ by that client's part and by what training has changed meanwhile"
    )


def shrinking_noise(decay: float, rounds: int, first: float, last: float) -> str:
    """What it means that noise shrinks over rounds; `first` and `last` in units of noise that stays the same."""
    return (
        f"the noise's deviation is multiplied by {decay:g} from each round to the next: beside noise that stays the "
        f"same for the same ε it is {first:.3g} times as large in the first of {rounds} rounds and {last:.3g} times in "
        "the last. ε is that of all rounds together, which add up exactly; of a client that misses rounds it is "
        "counted on that it takes part in the last ones, which cost most"
    )


def shrinking_clip(decay: float, rounds: int, last: float) -> str:
    """What it means that the clip shrinks over rounds; `last` is the last one's over the first one's."""
    return (
        f"the clip is multiplied by {decay:g} from each round to the next, to {last:.3g} of itself in the last of "
        f"{rounds} rounds, and the noise with it: what a round costs is what it would cost with the first clip"
    )


def adaptive_clip(share: float, longer: float) -> str:
    """What a clip costs that follows the updates."""
    return (
        "the clip follows how many updates, weighed by samples, are within it: each client tells that as one number "
        f"more of its upload, under the same noise. A share of {share:.3g} of what every round costs (as μ²) pays for "
        f"those answers, so that noise on updates is {longer:.4g} times as large for the same ε; the clip is public"
    )


def shared_noise(collusion: float, accounting: str, *, whoever: bool = True) -> tuple[str, ...]:
    """On whose noise a line counts where clients share it; not `whoever` where their places were drawn afterwards."""
    few = "one" if collusion == 0 else f"{collusion:.0%}, and at least one,"
    who = "whoever that is and" if whoever else "settled before the graph is drawn, and"
    return (
        "the lines of the server alone and of an outsider count on every client of a round to clip and to add its "
        f"noise; the others count on all but {few} of them, {who} whatever it does (more with --collusion)",
        SHARES_BY_SIZE if accounting == "paper" else EQUAL_SHARES,
    )
