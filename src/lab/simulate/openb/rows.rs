//! Parses the rows of the trace's two tables.

use super::{Qos, TraceError, TraceNode, TracePod, TraceText, WHOLE_GPU};
use crate::simulate::table::{Column, Table, TableRow};
use std::collections::BTreeSet;
use stowage_scheduling::ids::{GpuModel, InvalidName, NodeName};
use stowage_scheduling::units::{Bytes, MilliCpu, plural};
use stowage_scheduling::vocabulary::demand::MAX_GPUS;

/// More CPU or memory than any machine has; small enough that sums do not overflow.
const MAX_AMOUNT: u64 = 1 << 40;

pub fn nodes(source: TraceText<'_>) -> Result<Vec<TraceNode>, TraceError> {
    let table = Table::read(source)?;
    let [sn, cpu, memory, gpu, model] =
        table.columns(["sn", "cpu_milli", "memory_mib", "gpu", "model"])?;
    let mut names = BTreeSet::new();
    let mut node = |row: &TableRow<'_>| {
        let name = name(&table, row, sn, NodeName::parse)?;
        if !names.insert(name.clone()) {
            let (file, name) = (table.file.into(), name.to_string());
            return Err(TraceError::SameName {
                file,
                line: row.line,
                name,
            });
        }
        Ok(TraceNode {
            name,
            cpu: MilliCpu(row.whole(cpu, MAX_AMOUNT)?),
            memory: Bytes::mib(row.whole(memory, MAX_AMOUNT >> 20)?),
            gpus: row.whole(gpu, MAX_GPUS.into())? as u32,
            model: self::name(&table, row, model, GpuModel::parse)?,
        })
    };
    table.rows().iter().map(&mut node).collect()
}

pub fn pods(source: TraceText<'_>, nodes: &[TraceNode]) -> Result<Vec<TracePod>, TraceError> {
    let table = Table::read(source)?;
    let columns = PodColumns::from_table(&table)?;
    table
        .rows()
        .iter()
        .map(|row| pod(&table, row, &columns, nodes))
        .collect()
}

struct PodColumns {
    name: Column,
    cpu: Column,
    memory: Column,
    gpus: Column,
    milli: Column,
    models: Option<Column>,
    qos: Option<Column>,
}

impl PodColumns {
    fn from_table(table: &Table<'_>) -> Result<Self, TraceError> {
        let [name, cpu, memory, gpus, milli] =
            table.columns(["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"])?;
        let [models, qos] = ["gpu_spec", "qos"].map(|name| table.column_if_any(name));
        Ok(Self {
            name,
            cpu,
            memory,
            gpus,
            milli,
            models,
            qos,
        })
    }
}

fn pod(
    table: &Table<'_>,
    row: &TableRow<'_>,
    columns: &PodColumns,
    nodes: &[TraceNode],
) -> Result<TracePod, TraceError> {
    let pod = TracePod {
        name: row.text(columns.name).into(),
        cpu: MilliCpu(row.whole(columns.cpu, MAX_AMOUNT)?),
        memory: Bytes::mib(row.whole(columns.memory, MAX_AMOUNT >> 20)?),
        gpus: row.whole(columns.gpus, MAX_GPUS.into())? as u32,
        milli_per_gpu: row.whole(columns.milli, WHOLE_GPU.into())? as u32,
        models: match columns.models {
            Some(column) => models(table, row, column)?,
            None => [].into(),
        },
        qos: columns
            .qos
            .map(|column| qos(table, row, column))
            .transpose()?,
    };
    let is_whole = match pod.gpus {
        0 => pod.milli_per_gpu == 0,
        1 => pod.milli_per_gpu > 0,
        _ => pod.milli_per_gpu == WHOLE_GPU,
    };
    if !is_whole {
        let (
            file,
            line,
            TracePod {
                gpus,
                milli_per_gpu: milli,
                ..
            },
        ) = (table.file.to_owned(), row.line, pod);
        return Err(TraceError::PartOfSeveral {
            file,
            line,
            gpus,
            milli,
        });
    }
    check_satisfiable(table.file, row.line, &pod, nodes)?;
    Ok(pod)
}

/// A pod may be too large for the nodes of the models it names, and is never placed then; a pod that no list of nodes could be
/// meant for is an error.
fn check_satisfiable(
    file: &str,
    line: usize,
    pod: &TracePod,
    nodes: &[TraceNode],
) -> Result<(), TraceError> {
    let (file, name) = (file.to_owned(), pod.name.to_string());
    if !nodes.iter().any(|node| node.is_large_enough_for(pod)) {
        return Err(TraceError::LargerThanAnyNode {
            file,
            line,
            pod: name,
            wants: describe_request(pod),
        });
    }
    if !nodes.iter().any(|node| node.is_accepted_by(pod)) {
        return Err(TraceError::NoSuchModel {
            file,
            line,
            pod: name,
            models: model_names(pod),
        });
    }
    Ok(())
}

fn describe_request(pod: &TracePod) -> String {
    format!(
        "{}, {} thousandths of a CPU and {}",
        plural(pod.gpus, "GPU"),
        pod.cpu.0,
        pod.memory
    )
}

fn model_names(pod: &TracePod) -> String {
    let models: Vec<&str> = pod.models.iter().map(GpuModel::as_str).collect();
    models.join(" or ")
}

fn models(
    table: &Table<'_>,
    row: &TableRow<'_>,
    column: Column,
) -> Result<std::sync::Arc<[GpuModel]>, TraceError> {
    let named = row
        .text(column)
        .split('|')
        .filter(|model| !model.is_empty());
    named
        .map(|model| parse_name(table, row, "gpu_spec", model, GpuModel::parse))
        .collect()
}

fn qos(table: &Table<'_>, row: &TableRow<'_>, column: Column) -> Result<Qos, TraceError> {
    match row.text(column) {
        "BE" => Ok(Qos::BestEffort),
        "Burstable" => Ok(Qos::Burstable),
        "Guaranteed" => Ok(Qos::Guaranteed),
        "LS" => Ok(Qos::LatencySensitive),
        text => Err(TraceError::Qos {
            file: table.file.into(),
            line: row.line,
            text: text.into(),
        }),
    }
}

fn name<T>(
    table: &Table<'_>,
    row: &TableRow<'_>,
    column: Column,
    parse: impl Fn(&str) -> Result<T, InvalidName>,
) -> Result<T, TraceError> {
    parse_name(table, row, column.name(), row.text(column), parse)
}

fn parse_name<T>(
    table: &Table<'_>,
    row: &TableRow<'_>,
    column: &'static str,
    text: &str,
    parse: impl Fn(&str) -> Result<T, InvalidName>,
) -> Result<T, TraceError> {
    let (file, line) = (table.file.to_owned(), row.line);
    parse(text).map_err(|why| TraceError::Name {
        file,
        line,
        column,
        text: text.into(),
        why,
    })
}
