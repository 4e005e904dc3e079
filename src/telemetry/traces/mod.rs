//! Traces for OpenTelemetry, if a collector is named: a span for each call of kube-scheduler, for its decision and for each write.
//!
//! All spans of a pod are one trace, whose ID is the pod's UID: filter, prioritize, preempt and bind arrive as unrelated requests,
//! minutes apart and maybe at different replicas, and kube-scheduler sends no trace context with them. Each call is a root of that
//! trace; what it decides and writes is below it. Without a collector nothing is recorded, and a span costs the check of an
//! `Option`. [`export`] sends what is recorded; nothing here waits for it.

mod export;
mod trace_id;

pub use export::{Collector, ExporterThread, TraceError, start};

use futures::future::Either;
use opentelemetry::trace::{FutureExt, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, ContextGuard, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};

/// Records spans, or nothing.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<SdkTracer>>);

/// A span that ends when this is dropped; nothing while traces are off.
#[derive(Debug, Default)]
pub struct PodSpan {
    context: Option<Context>,
    /// Whether the span ends when this is dropped; the span of another handle is not ended here.
    is_owned: bool,
}

impl Traces {
    /// For a span that shall begin before its pod is known: the time, while traces are on.
    pub fn arrival_time(&self) -> Option<SystemTime> {
        self.0.as_ref().map(|_| SystemTime::now())
    }

    /// A call of kube-scheduler about a pod, which arrived then: a root of the pod's trace.
    pub fn call(
        &self,
        name: &'static str,
        arrived: Option<SystemTime>,
        uid: &PodUid,
        key: &PodKey,
    ) -> PodSpan {
        self.root(name, SpanKind::Server, uid, key, arrived)
    }

    /// What the planner did for a pod and took so long: a root of the pod's trace.
    pub fn plan(&self, uid: &PodUid, key: &PodKey, took: Duration) -> PodSpan {
        let began = self.arrival_time().and_then(|now| now.checked_sub(took));
        self.root("plan", SpanKind::Internal, uid, key, began)
    }

    /// A part of the present span; nothing without one.
    pub fn step(&self, name: &'static str) -> PodSpan {
        self.child_of_current(name, SpanKind::Internal, Vec::new)
    }

    /// A write to the API server about a pod: below the present span or, without one, a root of the pod's trace.
    pub fn write(&self, name: &'static str, uid: &PodUid, key: &PodKey) -> PodSpan {
        match self.0.is_some() && !Context::current().has_active_span() {
            true => self.root(name, SpanKind::Client, uid, key, None),
            false => self.child_of_current(name, SpanKind::Client, || pod_attributes(uid, key)),
        }
    }

    fn root(
        &self,
        name: &'static str,
        kind: SpanKind,
        uid: &PodUid,
        key: &PodKey,
        began: Option<SystemTime>,
    ) -> PodSpan {
        let Some(tracer) = &self.0 else {
            return PodSpan::default();
        };
        let mut builder = tracer
            .span_builder(name)
            .with_kind(kind)
            .with_attributes(pod_attributes(uid, key));
        builder.start_time = began;
        let nothing = Context::new();
        let span = trace_id::with_pod_trace(uid, || tracer.build_with_context(builder, &nothing));
        PodSpan {
            context: Some(nothing.with_span(span)),
            is_owned: true,
        }
    }

    fn child_of_current(
        &self,
        name: &'static str,
        kind: SpanKind,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> PodSpan {
        let Some(tracer) = &self.0 else {
            return PodSpan::default();
        };
        let parent = Context::current();
        if !parent.has_active_span() {
            return PodSpan::default();
        }
        let builder = tracer
            .span_builder(name)
            .with_kind(kind)
            .with_attributes(attributes());
        let span = tracer.build_with_context(builder, &parent);
        PodSpan {
            context: Some(parent.with_span(span)),
            is_owned: true,
        }
    }
}

impl PodSpan {
    /// The present span, for a task that goes on with it.
    pub fn current() -> Self {
        let context = Context::current();
        Self {
            context: context.has_active_span().then_some(context),
            is_owned: false,
        }
    }

    /// Makes this the present span of the thread, until the guard is dropped. Not across an await: see [`Self::instrument`].
    pub fn enter(&self) -> Option<ContextGuard> {
        self.context.clone().map(Context::attach)
    }

    /// The future, with this as its present span.
    pub fn instrument<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        match &self.context {
            Some(context) => Either::Left(future.with_context(context.clone())),
            None => Either::Right(future),
        }
    }

    pub fn set(&self, name: &'static str, value: impl Into<Value>) {
        if let Some(context) = &self.context {
            context.span().set_attribute(KeyValue::new(name, value));
        }
    }

    pub fn set_node(&self, node: &NodeName) {
        if self.context.is_some() {
            self.set("k8s.node.name", node.to_string());
        }
    }

    /// Marks it as failed, with a code that does not vary from pod to pod.
    pub fn fail(&self, code: &'static str) {
        if let Some(context) = &self.context {
            context.span().set_status(Status::error(code));
        }
    }

    pub fn is_recorded(&self) -> bool {
        self.context.is_some()
    }
}

impl Drop for PodSpan {
    fn drop(&mut self) {
        if let Some(context) = self.context.take().filter(|_| self.is_owned) {
            context.span().end();
        }
    }
}

/// A pod's attributes, by OpenTelemetry's semantic conventions for Kubernetes.
fn pod_attributes(uid: &PodUid, key: &PodKey) -> Vec<KeyValue> {
    vec![
        KeyValue::new("k8s.pod.name", key.name.to_string()),
        KeyValue::new("k8s.pod.uid", uid.to_string()),
        KeyValue::new("k8s.namespace.name", key.namespace.to_string()),
    ]
}

#[cfg(test)]
mod tests;
