//! What the library remembers between calls: the script as last read, whether it is initialized, and which events are out.
//!
//! One lock around it all. No C types but handles.

use crate::abi::{GPU_IS_LOST, Handle, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, UNINITIALIZED};
use crate::script::{NvmlScript, ScriptedGpu, Slice};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

static WORLD: Mutex<NvmlState> = Mutex::new(NvmlState::new());

/// Handles of one GPU: its own, and behind it one for each place a slice can have.
const HANDLES_PER_GPU: usize = 16;

pub struct NvmlState {
    script: Option<NvmlScript>,
    /// `nvmlInit` is counted, `nvmlShutdown` counts back.
    users: usize,
    /// How many of the script's XIDs were delivered.
    delivered: usize,
    /// Event sets, with the GPUs registered in each.
    sets: BTreeMap<Handle, Vec<Handle>>,
    /// Samples, with the GPU that each was taken of.
    samples: BTreeMap<Handle, Option<Handle>>,
    next_handle: Handle,
}

/// What a handle stands for.
pub enum HandleTarget<'a> {
    Gpu(&'a ScriptedGpu),
    Slice {
        slice: &'a Slice,
        parent: Handle,
        place: u32,
    },
}

pub fn world() -> MutexGuard<'static, NvmlState> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn gpu_handle(place: usize) -> Handle {
    (place + 1) * HANDLES_PER_GPU
}

/// The place of the GPU that a handle of it, or of a slice, is for.
pub fn place_of(handle: Handle) -> u32 {
    (handle / HANDLES_PER_GPU - 1) as u32
}

impl NvmlState {
    const fn new() -> Self {
        Self {
            script: None,
            users: 0,
            delivered: 0,
            sets: BTreeMap::new(),
            samples: BTreeMap::new(),
            next_handle: 1,
        }
    }

    /// Reads the script again. One that is missing or half written changes nothing.
    pub fn refresh(&mut self) {
        let text = script_path().and_then(|path| std::fs::read(path).ok());
        if let Some(script) = text.and_then(|text| serde_json::from_slice(&text).ok()) {
            self.script = Some(script);
        }
    }

    pub fn start(&mut self) -> Result<(), u32> {
        self.refresh();
        let script = self.script.as_ref().ok_or(crate::abi::UNKNOWN)?;
        match script.init_error {
            Some(code) => Err(code),
            None => {
                self.users += 1;
                Ok(())
            }
        }
    }

    pub fn stop(&mut self) -> Result<(), u32> {
        self.users = self.users.checked_sub(1).ok_or(UNINITIALIZED)?;
        Ok(())
    }

    pub fn script(&self) -> Result<&NvmlScript, u32> {
        self.script
            .as_ref()
            .filter(|_| self.users > 0)
            .ok_or(UNINITIALIZED)
    }

    /// What `handle` stands for, if `function` works for it.
    pub fn target(&self, handle: Handle, function: &str) -> Result<HandleTarget<'_>, u32> {
        let (place, slot) = (handle / HANDLES_PER_GPU, handle % HANDLES_PER_GPU);
        let place = place.checked_sub(1).ok_or(INVALID_ARGUMENT)?;
        let gpu = self.script()?.gpus.get(place).ok_or(INVALID_ARGUMENT)?;
        allowed(&gpu.refuse, function)?;
        if gpu.lost {
            return Err(GPU_IS_LOST);
        }
        if slot == 0 {
            return Ok(HandleTarget::Gpu(gpu));
        }
        let place = slot as u32 - 1;
        let slice = gpu.slices.get(&place).ok_or(INVALID_ARGUMENT)?;
        allowed(&slice.refuse, function)?;
        Ok(HandleTarget::Slice {
            slice,
            parent: handle - slot,
            place,
        })
    }

    /// As [`NvmlState::target`], for what slices do not have.
    pub fn gpu(&self, handle: Handle, function: &str) -> Result<&ScriptedGpu, u32> {
        match self.target(handle, function)? {
            HandleTarget::Gpu(gpu) => Ok(gpu),
            HandleTarget::Slice { .. } => Err(NOT_SUPPORTED),
        }
    }

    pub fn open(&self, place: usize, function: &str) -> Result<Handle, u32> {
        let gpu = self.script()?.gpus.get(place).ok_or(INVALID_ARGUMENT)?;
        allowed(&gpu.refuse, function)?;
        Ok(gpu_handle(place))
    }

    pub fn open_slice(&self, parent: Handle, place: u32, function: &str) -> Result<Handle, u32> {
        let gpu = self.gpu(parent, function)?;
        match gpu.slices.contains_key(&place) {
            true => Ok(parent + 1 + place as usize),
            false => Err(NOT_FOUND),
        }
    }

    pub fn new_set(&mut self) -> Handle {
        let set = self.new_handle();
        self.sets.insert(set, Vec::new());
        set
    }

    fn new_handle(&mut self) -> Handle {
        let handle = self.next_handle;
        self.next_handle += 1;
        handle
    }

    pub fn new_sample(&mut self) -> Handle {
        let sample = self.new_handle();
        self.samples.insert(sample, None);
        sample
    }

    pub fn free_sample(&mut self, sample: Handle) -> Result<(), u32> {
        let freed = self.samples.remove(&sample).map(drop);
        freed.ok_or(INVALID_ARGUMENT)
    }

    pub fn fill_sample(&mut self, sample: Handle, device: Handle) -> Result<(), u32> {
        let place = self.samples.get_mut(&sample).ok_or(INVALID_ARGUMENT)?;
        *place = Some(device);
        Ok(())
    }

    /// The GPU that a sample was taken of.
    pub fn sampled(&self, sample: Handle) -> Result<Handle, u32> {
        let device = self.samples.get(&sample).copied().flatten();
        device.ok_or(INVALID_ARGUMENT)
    }

    pub fn free_set(&mut self, set: Handle) -> Result<(), u32> {
        self.sets.remove(&set).map(drop).ok_or(INVALID_ARGUMENT)
    }

    pub fn register(&mut self, set: Handle, device: Handle) -> Result<(), u32> {
        self.sets
            .get_mut(&set)
            .ok_or(INVALID_ARGUMENT)?
            .push(device);
        Ok(())
    }

    /// The next event of a GPU in `set`, as the GPU and its XID.
    pub fn next_event(&mut self, set: Handle) -> Result<Option<(Handle, u64)>, u32> {
        let registered = self.sets.get(&set).ok_or(INVALID_ARGUMENT)?;
        let event = self
            .script()?
            .xids
            .get(self.delivered)
            .map(|event| (gpu_handle(event.gpu), event.xid));
        let event = event.filter(|(device, _)| registered.contains(device));
        self.delivered += usize::from(event.is_some());
        Ok(event)
    }
}

fn allowed(refuse: &BTreeMap<String, u32>, function: &str) -> Result<(), u32> {
    refuse.get(function).map_or(Ok(()), |code| Err(*code))
}

fn script_path() -> Option<PathBuf> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(|| match std::env::var_os("MOCK_NVML_SCRIPT") {
        Some(path) => Some(path.into()),
        None => own_path().map(|library| crate::script_beside(&library)),
    })
    .clone()
}

/// The file this library was loaded from: the one whose mapping has this function in it.
fn own_path() -> Option<PathBuf> {
    let here = own_path as fn() -> Option<PathBuf> as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let bounds = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let bounds = bounds.and_then(|(from, to)| {
            Some((
                usize::from_str_radix(from, 16).ok()?,
                usize::from_str_radix(to, 16).ok()?,
            ))
        });
        bounds.is_some_and(|(from, to)| (from..to).contains(&here))
    })?;
    line.find('/').map(|at| PathBuf::from(&line[at..]))
}

/// Where a figure the script leaves out is asked for.
pub fn said<T: Copy>(figure: Option<T>) -> Result<T, u32> {
    figure.ok_or(NOT_SUPPORTED)
}
