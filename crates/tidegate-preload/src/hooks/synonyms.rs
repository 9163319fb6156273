//! Functions of the C library that do the same under several names.

/// Functions that do what another of the same module does. They return an `int` unless they say
/// otherwise.
macro_rules! synonyms {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $same:ident($($given:expr),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $crate::hooks::synonyms::result!($($result)?) {
            // SAFETY: the same function.
            unsafe { $same($($given),*) }
        }
    )*};
}
pub(crate) use synonyms;

/// The type of a result.
macro_rules! result {
    () => {
        ::std::ffi::c_int
    };
    ($result:ty) => {
        $result
    };
}
pub(crate) use result;
