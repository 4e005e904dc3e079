//! The part of `stowage serve`'s command line about connections: how many are allowed, and how long each step may take.

use super::duration;
use clap::Args;
use std::time::Duration;
use stowage_server::extender::server::limits::ConnectionLimits;

#[derive(Debug, Args)]
#[command(next_help_heading = "Connections")]
pub struct ConnectionArgs {
    /// How long a TLS handshake may take
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_limit)]
    handshake_timeout: Duration,

    /// How long a new connection may send nothing
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_limit)]
    first_byte_timeout: Duration,

    /// How long a request's head may take from its first byte
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_limit)]
    head_timeout: Duration,

    /// How long a connection may be idle between two requests; kube-scheduler and the agents close theirs after 90s
    #[arg(long, value_name = "TIME", default_value = "100s", value_parser = time_limit)]
    idle_timeout: Duration,

    /// How long a client may read nothing of its answer
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = time_limit)]
    write_timeout: Duration,

    /// How long a request and its answer may take as a whole
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = time_limit)]
    request_timeout: Duration,

    /// Connections from one source on each address; agents behind one NAT are one source
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    connections_per_source: u32,

    /// Connections on --listen
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    listen_connections: u32,

    /// Connections on --agents; one for each agent
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..))]
    agents_connections: u32,

    /// Connections on --admin. All three together leave the process the descriptors that it needs for itself
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    admin_connections: u32,
}

impl ConnectionArgs {
    pub fn limits(&self) -> ConnectionLimits {
        ConnectionLimits {
            handshake: self.handshake_timeout,
            first_byte: self.first_byte_timeout,
            head: self.head_timeout,
            idle: self.idle_timeout,
            write: self.write_timeout,
            request: self.request_timeout,
            per_source: self.connections_per_source as usize,
            scheduler: self.listen_connections as usize,
            agents: self.agents_connections as usize,
            operators: self.admin_connections as usize,
        }
    }
}

/// The longest time limit, a year: a longer one is none.
const MAX_TIME_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

fn time_limit(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => {
            Err("no connection is served in no time; write a time such as 10s".into())
        }
        longer if longer > MAX_TIME_LIMIT => Err("longer than a year".into()),
        limit => Ok(limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        connections: ConnectionArgs,
    }

    fn limits(line: &str) -> ConnectionLimits {
        let words = std::iter::once("serve").chain(line.split_whitespace());
        Command::try_parse_from(words).unwrap().connections.limits()
    }

    #[test]
    fn each_flag_sets_its_own_limit() {
        let line = "--handshake-timeout 1s --first-byte-timeout 2s --head-timeout 3s --idle-timeout 4s \
                    --write-timeout 5s --request-timeout 6s --connections-per-source 7 --listen-connections 8 \
                    --agents-connections 9 --admin-connections 10";
        let expected = ConnectionLimits {
            handshake: Duration::from_secs(1),
            first_byte: Duration::from_secs(2),
            head: Duration::from_secs(3),
            idle: Duration::from_secs(4),
            write: Duration::from_secs(5),
            request: Duration::from_secs(6),
            per_source: 7,
            scheduler: 8,
            agents: 9,
            operators: 10,
        };
        assert_eq!(limits(line), expected);
    }

    #[test]
    fn without_flags_the_limits_are_the_defaults() {
        assert_eq!(limits(""), ConnectionLimits::default());
    }

    #[test]
    fn times_are_written_as_people_write_them() {
        assert_eq!(time_limit("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(time_limit("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(time_limit("2m"), Ok(Duration::from_secs(120)));
        for bad in ["10", "", "-1s", "0s", "100000h", "soon"] {
            assert!(time_limit(bad).is_err(), "{bad}");
        }
    }
}
