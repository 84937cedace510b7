"""The description of a network: text, TOML file, names."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import scipy.stats

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import (
    Cut,
    HostSettings,
    Kill,
    Link,
    Network,
    Pause,
    RandomOutages,
)
from mlbench_core.network.named_networks import NETWORKS, get_network
from mlbench_core.network.parsing import load_network, parse_network

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "network_lab.md"
TWO_CUTS = HostSettings(None, 1, (Cut(1, 2), Cut(3, 4)))
RACKS = Network(
    Link(10**10, 0.0002),
    Link(10**8, 0.04),
    2,
    2,
    {1: HostSettings(10**7, 0.5, (Cut(10, 15), Cut(30)))},
)
LATE = HostSettings(kills=(Kill(20, 30), Kill(40)), pauses=(Pause(1, 2),), join_s=5)
FAILING = Network(Link(10**9), hosts={2: LATE})
RANDOM = Network(
    Link(10**9), kills=RandomOutages(60, 10, 7), pauses=RandomOutages(mean_s=30, repair_s=2)
)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("100mbit", Network(Link(10**8))),
        (" 100Mbit , 20ms ", Network(Link(10**8, 0.02))),
        ("100mbit,20ms,2ms-jitter,0.1%-loss", Network(Link(10**8, 0.02, 0.002, 0.001))),
        ("unlimited,1.5s", Network(Link(None, 1.5))),
        ("2x2:10gbit/100mbit,40ms", Network(Link(10**10), Link(10**8, 0.04), 2, 2)),
        ("1gbit; host0: cut@3s-4s, cut@1s-2s", Network(Link(10**9), hosts={0: TWO_CUTS})),
        ("2x2: 10gbit,200us / 100mbit,40ms ; host1: 10mbit, 50%-cpu, cut@10s-15s, cut@30s", RACKS),
        ("1gbit; host2: kill@40s, join@5s, pause@1s-2s, kill@20s-30s", FAILING),
        ("1gbit; host1: 100%-cpu; host2: join@0s", Network(Link(10**9))),
        ("1gbit; kills: 7-seed, 60s-mtbf, 10s-repair; pauses: 30s-mtbf, 2s-repair", RANDOM),
    ],
)
def test_a_text_and_the_text_of_its_network_give_the_same(text: str, network: Network) -> None:
    assert parse_network(text) == network
    assert parse_network(str(network)) == network


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "link must not have an empty part"),
        ("100mbit,,20ms", "link must not have an empty part"),
        (
            "20ms",
            (
                "link '20ms' must have a bandwidth: write for "
                "example '100mbit,20ms' or 'unlimited,20ms'"
            ),
        ),
        ("100mbit,20", "part '20' must be a bandwidth"),
        ("100mbit,20ms,1gbit", "part '1gbit' must not follow another bandwidth"),
        ("100mbit,x-jitter", "jitter must be a time such as '20ms', '500us' or '1.5s', not 'x'"),
        ("100mbit,1ms,2ms-jitter", r"jitter must be from 0 to the round trip \(1ms\), not 2ms"),
        ("100mbit,1-loss", "loss must be a percentage such as '0.1%', not '1'"),
        ("100mbit,60%-loss", "loss must be from 0% to 50%, not 0.6"),
        ("100mbit,11s", "round trip must be from 0 to 10 s, not 11 s"),
        ("1bit", "bandwidth must be from 8 kbit/s"),
        (
            "2x2:1gbit",
            (
                r"must have a link between the racks after '/': write for example "
                r"'2x2:10gbit/100mbit,40ms'"
            ),
        ),
        ("1gbit/100mbit", "must begin with the racks"),
        ("1x2:1gbit/100mbit", "racks must be at least 2, not 1"),
        ("2x0:1gbit/100mbit", "hosts of a rack must be at least 1, not 0"),
        ("9x99:1gbit/100mbit", "hosts must be at most 250, not 891"),
        (
            "2x2:1gbit,5ms/100mbit",
            "round trip between racks must be at least that inside of a rack, not 0ms",
        ),
        ("2x2:1gbit/100mbit;host4:1mbit", "host must be from 0 to 3, not 4"),
        ("1gbit;slow", "part 'slow' must be like 'host1: 10mbit', after a ';'"),
        ("1gbit;host1:20ms", "part '20ms' of host 1 must be a bandwidth"),
        ("1gbit;host1:unlimited", "part 'unlimited' of host 1 must be a bandwidth"),
        ("1gbit;host1:1mbit,2mbit", "part '2mbit' of host 1 must not follow another bandwidth"),
        ("1gbit;host1:1mbit;host1:50%-cpu", "host 1 must be described once, not twice"),
        ("1gbit;host1:0%-cpu", "cpu must be from 1% to 100%, not 0"),
        ("1gbit;host1:cut@5s-5s", "cut must end after its start, not at 5s"),
        (
            "1gbit;host1:cut@5s,cut@7s",
            "cut@7s must begin after the end of the cut before it, cut@5s",
        ),
        ("1gbit;host1:cut@5", "start of a cut must be a time"),
        ("1gbit;host1:kill@5s-4s", "kill must end after its start, not at 4s: .*'kill@10s-15s'"),
        (
            "1gbit;host1:pause@1s-3s,pause@2s-4s",
            "pause@2s-4s must begin after the end of the pause before it, pause@1s-3s",
        ),
        ("1gbit;host1:join@5", "join must be a time such as"),
        ("1gbit;host1:join@5s,join@6s", "part 'join@6s' of host 1 must not follow another join"),
        ("1gbit;host1:stop@5s", "part 'stop@5s' of host 1 must be .* an event"),
        ("1gbit;kills:10s-repair", "kills must have a mean time between failures"),
        ("1gbit;kills:60s", "part '60s' of kills must be a mean time between failures"),
        ("1gbit;kills:60s-mtbf,9s-mtbf", "part '9s-mtbf' of kills must not follow another mtbf"),
        ("1gbit;kills:60s-mtbf;kills:9s-mtbf", "kills must be described once, not twice"),
        ("1gbit;kills:1ms-mtbf", "mtbf must be at least 100ms, not 1ms"),
        ("1gbit;kills:60-mtbf", "mtbf of kills must be a time"),
        ("1gbit;kills:60s-mtbf,x-seed", "seed of kills must be a whole number .*, not 'x'"),
        ("1gbit;pauses:60s-mtbf", "pauses must have the time of a repair"),
        ("9" * 2001, "network must have at most 2000 characters, not 2001"),
    ],
)
def test_errors_of_a_text_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_network(text)


def test_the_files_on_the_page_are_the_texts_with_the_same_values(tmp_path: Path) -> None:
    contents = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(contents) == 2
    file = tmp_path / "lab.toml"
    file.write_text(contents[0])
    assert load_network(file) == get_network(str(file)) == RACKS
    file.write_text(contents[1])
    # The text of the page, with the same events.
    (text,) = re.findall(r'--network "(1gbit;.*?)"', PAGE.read_text())
    assert load_network(file) == parse_network(text)


def test_random_outages_are_exponential_and_each_host_has_its_own() -> None:
    outages = RandomOutages(mean_s=60, repair_s=10, seed=3)

    def waits(kind: type[Kill | Pause], host: int) -> list[float]:
        found, last_end = [], 0.0
        for start, end in itertools.islice(outages.times(kind, host), 2000):
            assert end == start + 10
            found.append(start - last_end)
            last_end = end
        return found

    first = waits(Kill, 0)
    assert first == waits(Kill, 0)
    assert not set(first) & {*waits(Kill, 1), *waits(Pause, 0)}
    assert scipy.stats.kstest(first, scipy.stats.expon(scale=60).cdf).pvalue > 0.01


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bandwidth", "Expected '='"),
        ("x = 1", "keys of the file must be among racks, .*, not x"),
        ("", r"the table \[link\] must be given"),
        ("link = 1", r"\[link\] must be a table, not 1"),
        ("[link]\nspeed = 1", r"keys of \[link\] must be among bandwidth, .*, not speed"),
        ("[link]\nround_trip = '1ms'", r"bandwidth of \[link\] must be given"),
        (
            "[link]\nbandwidth = 100",
            "bandwidth must be a text such as '100mbit' or 'unlimited', not 100",
        ),
        (
            "[link]\nbandwidth = '1gbit'\nround_trip = 20",
            r"round_trip of \[link\] must be a time such as",
        ),
        (
            "racks = 2\n[link]\nbandwidth = '1gbit'",
            r"racks must be given if, and only if, the table \[between\]",
        ),
        (
            (
                "racks = 2\nhosts_per_rack = true\n[link]\nbandwidth = "
                "'1gbit'\n[between]\nbandwidth = '1gbit'"
            ),
            "hosts_per_rack must be a whole number, not True",
        ),
        ("hosts = 2\n[link]\nbandwidth = '1gbit'", r"hosts must be tables \[\[hosts\]\]"),
        (
            "[link]\nbandwidth = '1gbit'\n[[hosts]]\nhost = -1",
            r"host of \[\[hosts\]\] must be a number from 0",
        ),
        (
            "[link]\nbandwidth = '1gbit'\n[[hosts]]\nhost = 1\ncuts = '1s'",
            "cuts of host 1 must be a list",
        ),
        (
            "[link]\nbandwidth = '1gbit'\n[[hosts]]\nhost = 1\ncuts = [1]",
            "cut must be a text such as '10s-15s'",
        ),
        (
            "[link]\nbandwidth = '1gbit'\n[[hosts]]\nhost = 1\nkills = '1s'",
            "kills of host 1 must be a list",
        ),
        ("kills = 1\n[link]\nbandwidth = '1gbit'", r"\[kills\] must be a table, not 1"),
        (
            "[link]\nbandwidth = '1gbit'\n[kills]\nmtbf = '9s'\nseed = '1'",
            r"seed of \[kills\] must be a whole number",
        ),
        ("[link]\nbandwidth = '1gbit'\n[pauses]\nmtbf = 9", r"mtbf of \[pauses\] must be a time"),
    ],
)
def test_errors_of_a_file_name_the_file_and_the_key(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=f"lab.toml cannot be used: .*{message}"):
        load_network(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"cannot read the network .*none.toml: No such file"
    ):
        get_network(str(tmp_path / "none.toml"))


def test_a_name_that_is_almost_right() -> None:
    with pytest.raises(ValueError, match="not 'lan1g': did you mean 'lan-1g'"):
        get_network("lan1g")
    with pytest.raises(ValueError, match="not 'nothing': 'mlbench network list' shows the names"):
        get_network("nothing")
    assert get_network("unlimited").link.bandwidth is None


def test_the_page_has_every_name_with_its_text_and_source() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| `([^`]+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert {
        name: (text, title, source) for name, text, title, source in rows if name in NETWORKS
    } == {name: (known.text, known.title, known.source) for name, known in NETWORKS.items()}
    for known in NETWORKS.values():
        assert str(known.network) == known.text


def test_the_way_between_two_hosts_has_the_slowest_of_its_links() -> None:
    network = parse_network("2x2:1gbit,1ms/100mbit,40ms;host1:10mbit")
    assert network.path(2, 3) == Link(10**9, 0.001)
    assert network.path(0, 2) == Link(10**8, 0.04)
    assert network.path(2, 1) == Link(10**7, 0.04)
    assert parse_network("unlimited").path(0, 1).bandwidth is None


@pytest.mark.parametrize(
    ("text", "hosts", "message"),
    [
        ("2x2:1gbit/100mbit", 2, r"hosts must be 4 \(2 racks of 2\), not 2"),
        ("1gbit;host2:1mbit", 2, "hosts must be at least 3, not 2: the network describes host 2"),
        ("1gbit", 251, "hosts must be from 1 to 250, not 251"),
    ],
)
def test_a_number_of_hosts_that_the_network_cannot_have(
    text: str, hosts: int, message: str
) -> None:
    network = parse_network(text)
    with pytest.raises(ValueError, match=message):
        network.check_hosts(hosts)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1gbps", "did you mean '1gbit'?"),
        ("10 Gbit/s", "did you mean '10gbit'?"),
        ("1Gb/s,20ms", "did you mean '1gbit', or '8gbit' for bytes?"),
        ("100MB", "did you mean '100mbit', or '800mbit' for bytes?"),
        ("12.5 MByte/s", "did you mean '100mbit'?"),
        ("1g", "did you mean '1gbit'?"),
        ("100", "did you mean '100mbit'?"),
        ("1tbit", "did you mean '1000gbit'?"),
        ("1gbit; host1: 10mbps", "did you mean '10mbit'?"),
    ],
)
def test_a_bandwidth_in_another_unit_gets_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)):
        get_network(text)
