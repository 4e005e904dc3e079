//! Enums whose values have codes: names in metrics, conditions and JSON. Each is declared with its value, once.

/// An enum of reasons. Of each the code, which is its name in metrics and in JSON (or, in brackets, that of the reason inside it), the
/// value with its figures, the sentence with them, and what else there is to it, if anything.
#[macro_export]
macro_rules! coded {
    ($(#[$meta:meta])* pub enum $Name:ident $(: $About:ty)? {
        $($(#[$vm:meta])* $code:literal $([$own:expr])? $Value:ident $({ $($f:ident: $t:ty),* $(,)? })? $(($n:ident: $nt:ty))?,
            $text:literal $(, $arg:expr)* $(=> $about:expr)?;)*
    }) => {
        $(#[$meta])*
        pub enum $Name {
            $($(#[$vm])* $Value $({ $($f: $t),* })? $(($nt))?),*
        }

        #[allow(unused_variables, reason = "a sentence need not have all figures")]
        impl $Name {
            /// All codes, so that a metric has each from the start.
            pub const CODES: &'static [&'static str] = &[$($code),*];

            /// A short name for metrics, conditions and JSON, the same on every node.
            pub fn code(&self) -> &'static str {
                match self {
                    $(Self::$Value $({ $($f),* })? $(($n))? => [$($own,)? $code][0],)*
                }
            }

            /// What else its entry has.
            #[allow(unused_parens, reason = "an entry need not have anything else")]
            pub fn entry(&self) -> ($($About)?) {
                match self {
                    $(Self::$Value $({ $($f),* })? $(($n))? => ($($about)?),)*
                }
            }
        }

        impl std::fmt::Display for $Name {
            #[allow(unused_variables, reason = "a sentence need not have all figures")]
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$Value $({ $($f),* })? $(($n))? => write!(f, $text $(, $arg)*),)*
                }
            }
        }

        impl std::error::Error for $Name {}
    };
}

pub use coded;
