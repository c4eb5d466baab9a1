//! Compiles the `.proto` files with a pure-Rust compiler: no system `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=baton");
    let files = protox::compile(["baton/v1/baton.proto"], ["."])?;
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    Ok(())
}
