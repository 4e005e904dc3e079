//! Two builds of Stowage beside each other: `cargo bench --features jemalloc --bench verbs -- --beside BINARY [--rounds N] [NODES…]`.
//!
//! Every round starts the other build, this one, and this one a second time, each a `stowage serve` over the same dump; every
//! request goes to all three before the next is made, and the order of the three changes from request to request. Other load on
//! the machine affects all; the luck of a process's memory layout changes with the round. A round gives one ratio of medians per
//! verb, this build to the other, and one of this build to itself. The bench prints the median ratio of all rounds with the
//! interval that order statistics give it, which supposes nothing about how the ratios are distributed.
//!
//! "Within 5 %" means: the interval's upper end is at most 1.05, or at most that of this build against itself where that is
//! larger. The exit code is 0 if every verb is.

use crate::cluster::{self, BenchCluster};
use crate::connection::KeepAliveConnection;
use crate::samples::Samples;
use crate::server::ServeProcess;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Default and minimum of `--rounds`: the interval of fewer rounds says little.
const ROUNDS: usize = 20;
/// Requests of each verb, in each round, to each process.
const REQUESTS: usize = 100;
/// Requests before these, which are not counted.
const WARM_UP: usize = 20;
const MAX_RATIO: f64 = 1.05;
/// Maximum probability that the interval misses the median.
const MAX_MISS_PROBABILITY: f64 = 0.05;
const VERBS: [&str; 4] = ["filter", "prioritize", "bind", "filter, all refused"];

pub struct BesideArgs {
    other: PathBuf,
    rounds: usize,
    sizes: Vec<usize>,
}

impl BesideArgs {
    /// `None` unless the arguments name another build; an error says what is wrong with them.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Option<Self>, String> {
        let (mut other, mut rounds, mut sizes) = (None, ROUNDS, Vec::new());
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--beside" => other = Some(PathBuf::from(arguments.next().unwrap_or_default())),
                "--rounds" => {
                    let asked = arguments.next().and_then(|rounds| rounds.parse().ok());
                    rounds = asked
                        .filter(|rounds| *rounds >= ROUNDS)
                        .ok_or(format!("--rounds takes a number of {ROUNDS} or more"))?;
                }
                number => sizes.extend(number.parse::<usize>()),
            }
        }
        let Some(other) = other else { return Ok(None) };
        if !other.is_file() {
            return Err(format!(
                "--beside takes the path of a built stowage; {} is no file",
                other.display()
            ));
        }
        if sizes.is_empty() {
            sizes = vec![1000, 5000];
        }
        Ok(Some(Self {
            other,
            rounds,
            sizes,
        }))
    }

    pub fn compare(&self) -> ExitCode {
        let twenty: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(
            Interval::for_median(twenty).ends(),
            (6.0, 15.0),
            "as in any table of the sign test for n = 20"
        );
        let folder = tempfile::tempdir().expect("a folder for the dump");
        let slower: Vec<String> = self
            .sizes
            .iter()
            .flat_map(|nodes| self.compare_at(*nodes, &folder.path().join("cluster.json")))
            .collect();
        match slower.as_slice() {
            [] => {
                println!("\nverdict: within 5 % of {}", self.other.display());
                ExitCode::SUCCESS
            }
            slower => {
                println!(
                    "\nverdict: not within 5 % of {}: {}",
                    self.other.display(),
                    slower.join("; ")
                );
                ExitCode::FAILURE
            }
        }
    }

    /// Compares one cluster size. Returns the verbs that are slower.
    fn compare_at(&self, nodes: usize, dump: &Path) -> Vec<String> {
        let cluster = BenchCluster::new(nodes, REQUESTS + WARM_UP);
        std::fs::write(dump, cluster.dump()).expect("the dump is written");
        let mut ratios: [[Vec<f64>; 2]; 4] = Default::default();
        for round in 0..self.rounds {
            for (verb, [to_other, to_itself]) in self
                .run_round(round, &cluster, dump)
                .into_iter()
                .enumerate()
            {
                ratios[verb][0].push(to_other);
                ratios[verb][1].push(to_itself);
            }
        }
        println!(
            "\n{nodes} nodes × 8 GPUs, {} rounds of {REQUESTS} requests: p50 of this build ÷ p50 of the other, median of the rounds \
             [{}]",
            self.rounds,
            Interval::for_median(ratios[0][0].clone()).describe()
        );
        let classified = VERBS.into_iter().zip(ratios).map(|(verb, [to_other, to_itself])| {
            let (other, itself) = (Interval::for_median(to_other), Interval::for_median(to_itself));
            let limit = MAX_RATIO.max(itself.high);
            let is_within = other.high <= limit;
            println!(
                "{verb:<20} beside the other {other}   beside itself {itself}   upper end {} {limit:.3}",
                if is_within { "≤" } else { ">" }
            );
            (!is_within).then(|| format!("{verb} at {nodes} nodes: {other}, limit {limit:.3}"))
        });
        classified.flatten().collect()
    }

    /// Ratios of medians for each verb: this build to the other, and this build to itself.
    fn run_round(&self, round: usize, cluster: &BenchCluster, dump: &Path) -> [[f64; 2]; 4] {
        let this = Path::new(env!("CARGO_BIN_EXE_stowage"));
        let mut builds = [&*self.other, this, this].map(|binary| Build::start(binary, dump));
        for request in 0..REQUESTS + WARM_UP {
            for verb in 0..VERBS.len() {
                for turn in 0..builds.len() {
                    let asked = (turn + request + round) % builds.len();
                    builds[asked].call_verb(verb, request, cluster);
                }
            }
        }
        std::array::from_fn(|verb| {
            let [other, this, again] =
                [0, 1, 2].map(|build| builds[build].samples[verb].percentile(50));
            [this / other, this / again]
        })
    }
}

/// Running process of a build, and the times of its answers.
struct Build {
    address: String,
    /// Made by the first request: a connection that says nothing while the others start is closed.
    connection: Option<KeepAliveConnection>,
    samples: [Samples; 4],
    /// Answers to the previous verbs, which the next request is about.
    passed: Vec<String>,
    top: String,
    _process: ServeProcess,
}

impl Build {
    /// Starts the build with options that every build has.
    fn start(binary: &Path, dump: &Path) -> Self {
        let process = ServeProcess::start(
            Command::new(binary)
                .args([
                    "serve",
                    "--listen",
                    "127.0.0.1:0",
                    "--agents",
                    "127.0.0.1:0",
                ])
                .args(["--admin", "127.0.0.1:0", "--cluster"])
                .arg(dump)
                .env(
                    "RUST_LOG",
                    "stowage::serve=info,stowage_server::serve=info,warn",
                ),
            &["the scheduler: http://"],
        );
        Self {
            address: process.addresses[0].clone(),
            connection: None,
            samples: Default::default(),
            passed: Vec::new(),
            top: String::new(),
            _process: process,
        }
    }

    fn call_verb(&mut self, verb: usize, request: usize, cluster: &BenchCluster) {
        let (path, body) = match VERBS[verb] {
            "filter" => ("filter", cluster.filter_body(request)),
            "prioritize" => ("prioritize", cluster.prioritize_body(request, &self.passed)),
            "bind" => ("bind", cluster.bind_body(request, &self.top)),
            _ => ("filter", cluster.refused_body(request)),
        };
        let connection = self
            .connection
            .get_or_insert_with(|| KeepAliveConnection::connect(&self.address));
        let started = Instant::now();
        let answer = connection.post(&format!("/scheduler/{path}"), &body, None);
        let took = started.elapsed();
        if request >= WARM_UP {
            self.samples[verb].add(took);
        }
        match VERBS[verb] {
            "filter" => self.passed = cluster::passed_names(&answer),
            "prioritize" => self.top = cluster::top_name(&answer),
            "bind" => cluster::assert_bound(&answer),
            _ => cluster::assert_all_refused(&answer, cluster.nodes()),
        }
    }
}

/// Median of a sample, and a confidence interval of the median: two order statistics.
struct Interval {
    median: f64,
    low: f64,
    high: f64,
    /// Rank of the interval's ends, from either end of the sorted values.
    rank: usize,
    coverage: f64,
    values: usize,
}

impl Interval {
    fn for_median(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len();
        // How often no more than `k` of `n` values lie below the median: the tail of a binomial distribution with 1/2.
        let (mut place, mut tail, mut chance) = (0, 0.0, 0.5_f64.powi(n as i32));
        while place < n / 2 && 2.0 * (tail + chance) <= MAX_MISS_PROBABILITY {
            tail += chance;
            chance *= (n - place) as f64 / (place + 1) as f64;
            place += 1;
        }
        assert!(place > 0, "{n} rounds are too few");
        let median = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
        let coverage = 1.0 - 2.0 * tail;
        Self {
            median,
            low: values[place - 1],
            high: values[n - place],
            rank: place,
            coverage,
            values: n,
        }
    }

    fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    fn describe(&self) -> String {
        let (place, n, coverage) = (self.rank, self.values, 100.0 * self.coverage);
        format!(
            "order statistics {place} and {} of {n}: {coverage:.1} % confidence",
            n + 1 - place
        )
    }
}

impl std::fmt::Display for Interval {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} [{:.3}, {:.3}]", self.median, self.low, self.high)
    }
}
